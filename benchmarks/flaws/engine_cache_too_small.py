"""An engine whose cache has no room for the requests that it begins."""

from running import FLAWED, serve

serve(8, lambda number: 40, answers=(100,), num_blocks=20 if FLAWED else 1024, page_size=32)
