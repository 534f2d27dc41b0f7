"""Prompts that scripts share: short, varied, and of our own making."""

PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "To make a cup of tea, first",
    "In 1969, the first humans",
    "The square root of 144 is",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name FROM users WHERE",
    "Photosynthesis is the process by which",
    "My favourite thing about winter is",
    "A list of fruits:\n1. Apple\n2. Banana\n3.",
    "The opposite of hot is",
    "Q: What is the largest planet?\nA:",
    "import numpy as np\n\n# Compute the mean of each column\n",
    "It was a dark and stormy night;",
    "Der schnelle braune Fuchs",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Monday, Tuesday, Wednesday,",
)

# Answers to these repeat much of the question, which is what prompt lookup is for.
COPYING_PROMPTS = (
    "Repeat this sentence three times: The library opens at nine in the morning and closes at six in the evening.",
    "Correct the spelling and write the whole text again: 'The comittee will recieve the finnal report on tuesday, "
    "and the chairman will anounce the desision on friday.'",
)
