"""What is missing or doubtful in a trace, and the grade that follows from it."""

from xsp.health.checks import grade, health

__all__ = ["grade", "health"]
