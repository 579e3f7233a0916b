"""Generated pages and the chart, each a function of the saved runs in docs/results."""
