"""The span table of a run: write its steps, merge them into true times, and read them back as a trace."""
