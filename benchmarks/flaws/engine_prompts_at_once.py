"""An engine that reads whole prompts, some of them long, in the steps in which others wait for their next token."""

from running import FLAWED, serve

serve(6, lambda number: 1500 if number % 6 == 5 else 16, range(12, 36), max_batch_tokens=4096 if FLAWED else 128)
