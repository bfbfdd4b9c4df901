"""An engine that answers at most two of sixteen requests at once."""

from running import FLAWED, serve

serve(16, lambda number: 8 + number % 5, max_requests_per_batch=2 if FLAWED else 32)
