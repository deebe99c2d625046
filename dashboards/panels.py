"""The few kinds of panel that the dashboards are made of, all alike in size, legend and tooltip.

Pure: builds values of Grafana's foundation SDK, which knows the JSON. Called by each dashboard.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")

JOB = 'namespace=~"$namespace", job=~"$job"'
"""The dashboard's choice, in every selector of a job's series."""

HEIGHT = 8
STAT_HEIGHT = 4


def age(of: str) -> str:
    """Seconds since the newest complete checkpoint was first seen to be complete; `of`: the selector's inside."""
    return f"time() - max by (namespace, job, tier) (surefoot_checkpoint_complete_timestamp_seconds{{{of}}})"


def query(expression: str, legend: str = "") -> prometheus.Dataquery:
    """A time series. `legend`: Grafana's own braces around a label's name."""
    return prometheus.Dataquery().datasource(SOURCE).expr(expression).legend_format(legend).range()


def lines(title: str, about: str, unit: str, *queries: prometheus.Dataquery, width: int = 8) -> timeseries.Panel:
    """Lines over time."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .span(width)
        .height(HEIGHT)
        .min(0)
        .fill_opacity(8)
        .show_points(common_models.VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    return panel.targets([query.ref_id(chr(ord("A") + place)) for place, query in enumerate(queries)])


def heat(title: str, about: str, buckets: str, width: int = 6) -> heatmap.Panel:
    """A histogram over time. `buckets`: the selector of a latency histogram's buckets."""
    expression = f"sum by (le) (increase({buckets}[$__rate_interval]))"
    found = prometheus.Dataquery().datasource(SOURCE).expr(expression).legend_format("{{le}}").ref_id("A")
    return (
        heatmap.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(width)
        .height(HEIGHT)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .exponent(0.5)
            .steps(64)
        )
        .rows_frame(heatmap.RowsHeatmapOptions().layout(common_models.HeatmapCellLayout.AUTO))
        .y_axis(heatmap.YAxisConfig().unit("s").axis_placement(common_models.AxisPlacement.LEFT))
        .cell_gap(1)
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .tooltip(
            heatmap.HeatmapTooltip()
            .mode(common_models.TooltipDisplayMode.SINGLE)
            .y_histogram(True)
            .show_color_scale(False)
        )
        .targets([found.format(PromQueryFormat.HEATMAP).range()])
    )


def number(
    title: str,
    about: str,
    unit: str,
    expression: str,
    legend: str,
    bounds: dict[float, str] | None = None,
    is_name: bool = False,
) -> stat.Panel:
    """The value now: over a range Grafana would also show the last one of each series that has ended since.

    `bounds`: from which value on which colour; the first one's value is what everything is above. `is_name`: the legend
    says everything.
    """
    steps = [
        dashboard_models.Threshold(value=None if place == 0 else value, color=color)
        for place, (value, color) in enumerate((bounds or {0.0: "blue"}).items())
    ]
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .span(4)
        .height(STAT_HEIGHT)
        .thresholds(dashboard.ThresholdsConfig().mode(dashboard_models.ThresholdsMode.ABSOLUTE).steps(steps))
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .text_mode(common_models.BigValueTextMode.NAME if is_name else common_models.BigValueTextMode.VALUE_AND_NAME)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .targets([_instant(expression, legend).ref_id("A")])
    )


def _instant(expression: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(SOURCE).expr(expression).legend_format(legend).instant()


def mark(name: str, color: str, expression: str, title: str, at_value: bool) -> dashboard.AnnotationQuery:
    """Moments or spans over every panel. `at_value`: the expression's value is the moment, in milliseconds."""
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(color)
        .expr(expression)
        .step("10s")
        .title_format(title)
        .tag_keys("namespace,job")
        .use_value_for_time(at_value)
    )


def choice(name: str, label: str, values: str) -> dashboard.QueryVariable:
    """A variable whose values are those of a label: `values` is Grafana's label_values(metric, label)."""
    everything = dashboard_models.VariableOption(text="All", value="$__all")
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(values)
        .refresh(dashboard_models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
        .sort(dashboard_models.VariableSort.ALPHABETICAL_ASC)
    )
