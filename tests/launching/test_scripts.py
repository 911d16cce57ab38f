"""What is printed for schedulers: read back by a shell and a YAML parser, and run where a stand-in can run it."""

import os
import subprocess

import pytest
import yaml

from zero2jax.cli.main import main
from zero2jax.launching.scripts import Job, jobset_manifest, mpi_command, slurm_script

JOB = Job(("examples/gpt/Train_it.py", "--text", "my $text's"), 2, 4, 1)
WORDS = ["python", "-u", "examples/gpt/Train_it.py", "--text", "my $text's"]

# Stand-ins that say how they were called: their words, and what the program would find in its environment.
STAND_INS = {
    "scontrol": "#!/bin/sh\nprintf 'node1\\nnode2\\n'\n",
    "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do echo "option $1"; shift; done\nSLURM_LOCALID=1 exec "$@"\n',
    "mpirun": """#!/bin/bash
while [ "${1#-}" != "$1" ]; do
  if [ "$1" = -x ]; then export "$2"; fi
  echo "option $1 $2"; shift 2
done
OMPI_COMM_WORLD_LOCAL_RANK=3 exec "$@"
""",
    "python": '#!/bin/sh\nprintf "word %s\\n" "$@"\n'
    'echo "found $MASTER_ADDR $MASTER_PORT $JAX_LOCAL_DEVICE_IDS $JAX_PLATFORMS $JAX_NUM_CPU_DEVICES"\n'
    'echo "token $ZERO2JAX_TOKEN"\n',
}


@pytest.fixture
def run(tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run_script(script):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        env = {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "41000",
            "SLURM_JOB_NODELIST": "x",
        }
        done = subprocess.run(
            ["bash"], input=script, env=env, text=True, capture_output=True, cwd=tmp_path, check=True
        )
        found = {}
        for line in done.stdout.splitlines():
            kind, _, rest = line.partition(" ")
            found.setdefault(kind, []).append(rest)
        return found

    return run_script


def test_each_run_of_a_script_makes_a_secret_of_its_own(run):
    for script in (slurm_script(JOB), mpi_command(JOB)):
        tokens = [run(script)["token"] for _ in range(2)]
        assert all(len(token[0]) == 32 for token in tokens)
        assert tokens[0] != tokens[1]
    (container,) = yaml.safe_load(jobset_manifest(JOB))["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"]["containers"]
    (secret,) = (
        row["valueFrom"]["secretKeyRef"] for row in container["env"] if row["name"] == "ZERO2JAX_TOKEN"
    )
    assert secret == {"name": "train-it-token", "key": "token", "optional": True}


def test_mpirun_gets_the_coordinator_without_its_user_and_with_its_port(tmp_path, capsys):
    (tmp_path / "hosts").write_text("me@alpha slots=2\n")
    options = ["launch", "--print", "mpi", "--hostfile", str(tmp_path / "hosts")]
    assert main([*options, "t.py"]) == 0
    assert "-x MASTER_ADDR=alpha -x MASTER_PORT=29500 " in capsys.readouterr().out
    assert main([*options, "--coordinator", "beta:77", "t.py"]) == 0
    assert "-x MASTER_ADDR=beta -x MASTER_PORT=77 " in capsys.readouterr().out
    assert main([*options, "--coordinator", "beta:70000", "t.py"]) == 2
    assert "reading the coordinator 'beta:70000'" in capsys.readouterr().err


def test_slurm_gets_one_task_per_process(run):
    script = slurm_script(JOB)
    assert script.splitlines()[:5] == [
        "#!/bin/bash",
        "#SBATCH --job-name=train-it",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
    ]
    found = run(script)
    assert found["option"] == ["--kill-on-bad-exit=1"]
    assert found["word"] == WORDS[1:]
    assert found["found"] == ["node1 21000   "]


def test_processes_with_several_gpus_each_are_told_which(run):
    job = Job(JOB.program, 2, 4, 2)
    found = run(slurm_script(job))
    assert found["word"] == WORDS[1:]
    assert found["found"] == ["node1 21000 2,3  "]
    assert run(mpi_command(Job(JOB.program, 2, 4, 2, coordinator_host="h")))["found"] == ["h 29500 6,7  "]
    whole_hosts = Job(JOB.program, 2, 1, 8)
    assert run(slurm_script(whole_hosts))["found"] == ["node1 21000   "]


def test_simulated_devices_ask_for_no_gpu(run, tmp_path):
    job = Job(JOB.program, 2, 4, 2, platform="cpu", logs=tmp_path / "my logs")
    script = slurm_script(job)
    assert "gpus" not in script
    found = run(script)
    assert found["found"] == ["node1 21000  cpu 2"]
    assert found["option"][1] == f"--output={tmp_path}/my logs/process%t.log"
    assert (tmp_path / "my logs").is_dir()
    assert run(mpi_command(job))["found"][0].endswith("29500  cpu 2")


def test_mpi_gets_processes_by_host(run, tmp_path):
    job = Job(JOB.program, 2, 4, 1, hostfile=tmp_path / "hosts", coordinator_host="node1")
    found = run(mpi_command(job))
    assert found["option"][:3] == ["-np 8", "--map-by ppr:4:node", f"--hostfile {tmp_path}/hosts"]
    assert found["word"] == WORDS[1:]
    assert found["found"] == ["node1 29500   "]


def test_kubernetes_gets_one_pod_per_host(run):
    manifest = yaml.safe_load(jobset_manifest(Job(JOB.program, 2, 4, 2, max_restarts=3)))
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"]["name"] == "train-it"
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 3
    (workers,) = manifest["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert (job["completionMode"], job["parallelism"], job["completions"]) == ("Indexed", 2, 2)
    (container,) = job["template"]["spec"]["containers"]
    assert container["image"] == "IMAGE"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    shell, option, text = container["command"]
    assert (shell, option) == ("bash", "-c")
    found = run(f"JOB_COMPLETION_INDEX=1\n{text}\n")["word"]
    expected = "-m zero2jax launch --processes 4 --devices-per-process 2 --platform gpu"
    place = "--coordinator train-it-workers-0-0.train-it:29500 --first-process 4 --total-processes 8"
    assert found == [*expected.split(), *place.split(), *WORDS[2:]]


def test_the_command_line_prints_them(tmp_path, capsys):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=8\nb slots=8\n")
    assert main(["launch", "--print", "slurm", "--hostfile", str(hosts), "train.py", "--print", "x"]) == 0
    found = capsys.readouterr().out
    assert "--nodes=2\n#SBATCH --ntasks-per-node=8\n" in found
    assert found.endswith("python -u train.py --print x\n")
    assert main(["launch", "--print", "k8s", "--hosts", "3", "--platform", "cpu", "train.py"]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert "resources" not in str(manifest)
    assert manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 3
    assert main(["launch", "--include", "a", "train.py"]) == 2
    assert "there is no --hostfile to filter" in capsys.readouterr().err


def test_filters_reach_mpirun_and_uneven_hosts_are_refused(tmp_path, capsys):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=4\nb slots=2 max_slots=8\nc slots=4\n")
    options = ["launch", "--hostfile", str(hostfile), "--print", "mpi"]
    assert main([*options, "--include", "a@c", "t.py"]) == 0
    out = capsys.readouterr().out
    assert "mpirun -np 8 --map-by ppr:4:node --host a:4,c:4 " in out
    assert "--hostfile" not in out
    assert main([*options, "t.py"]) == 2
    assert "printing for mpi: host b has the slots 0, 1; all hosts must" in capsys.readouterr().err
    assert main([*options, "--include", "a:1,2", "t.py"]) == 2
    assert "host a has the slots 1, 2" in capsys.readouterr().err


def test_memory_options_are_in_what_is_printed_and_in_the_environment_of_what_is_started(
    run, capsys, monkeypatch, tmp_path
):
    names = {"XLA_CLIENT_MEM_FRACTION": "0.8", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for name in names:
        monkeypatch.setenv(name, "")  # so that what is written here is undone
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\necho pool $XLA_CLIENT_MEM_FRACTION $XLA_PYTHON_CLIENT_PREALLOCATE\n")
    script.chmod(0o755)
    options = ["--memory-fraction", "0.8", "--memory-preallocate", "no"]
    for where in ("slurm", "mpi", "k8s"):
        for name in names:
            monkeypatch.setenv(name, "")
        assert main(["launch", "--print", where, *options, str(script)]) == 0
        printed = capsys.readouterr().out
        if where == "k8s":
            pod = yaml.safe_load(printed)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            env = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
            assert env.items() >= names.items()
        else:
            assert run(printed)["pool"] == ["0.8 false"]
    assert main(["launch", *options, str(script)]) == 0
    assert main(["launch", "--memory-fraction", "0.7", str(script)]) == 2
    assert "fraction is 0.7, and the environment says XLA_CLIENT_MEM_FRACTION=0.8" in capsys.readouterr().err
