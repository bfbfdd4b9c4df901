"""Questions of advice that a graph, timings or a bound answer; entry points `xsp.questions` name them."""
