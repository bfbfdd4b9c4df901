"""Reports: tables in a terminal, and one page that opens offline."""
