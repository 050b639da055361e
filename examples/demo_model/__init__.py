"""The embedded demo model: data generator, tokenizer, trainer, export and evaluation.

See README.md in this folder. Nothing here is imported by the server or the engine.
"""
