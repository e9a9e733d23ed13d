"""A demonstration: train a small mixture-of-experts language model in several recipes.

Run ``python -m grouped.demo``; ``--help`` lists the options. The model is in ``model.py``, the
training loop in ``train.py``.
"""
