"""Loads in which a language model generates text, several requests at a time, and each token is timed.

```
prompts      the prompt and the number of tokens of each request, drawn from a seed
batching     a model of transformers that continues several requests together
driving      applies a schedule to such a model, in this process
endpoint     applies a schedule to a server with OpenAI's completions, over HTTP
timing       the times of each token, and their statistics: first token, time between tokens, rates, goodput
measuring    a manifest's load on its model or endpoint
```
"""
