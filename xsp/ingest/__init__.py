"""Spans that come from elsewhere, in any order and perhaps twice, become run directories."""
