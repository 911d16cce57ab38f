"""Fine-tune a published model of the Llama family, and write it back: start with `model.py` and `train.py`."""
