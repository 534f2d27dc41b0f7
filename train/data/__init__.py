"""From data sets to batches: texts, then tokens, then plans of batches, then a feed that resumes exactly.

Only this package imports tensorflow_datasets and grain; TensorFlow itself is never needed.
"""
