"""What sees a GPU: CUPTI's records of device work, the libraries' own calls, graphs.

Nothing here imports `cupti` when it is imported itself: the extra may be absent, and then says so.
"""
