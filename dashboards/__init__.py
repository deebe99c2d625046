"""Grafana dashboards as code: `python -m dashboards` writes the chart's JSON from them. Needs the group `dashboards`."""
