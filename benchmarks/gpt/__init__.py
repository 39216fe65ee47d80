"""The pieces of the main job, ``benchmarks/train_gpt.py``: text, model, optimizer arms, loop, report."""
