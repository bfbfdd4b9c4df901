"""The span table of a run: its steps as they are written, merged into true times, and read again as a trace."""
