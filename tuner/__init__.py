"""Searches configs on the GPU at hand, or predicts them for one that is not. The only importer of Optuna."""
