"""The few kinds of panel that the dashboards are made of, all alike in size, legend and tooltip.

Pure: builds values of Grafana's foundation SDK, which knows the JSON. Called by each dashboard.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")

JOB = 'namespace=~"$namespace", job=~"$job"'
"""The dashboard's choice, in every selector of a job's series."""

HEIGHT = 8
STAT_HEIGHT = 4

_Panel = TypeVar("_Panel", timeseries.Panel, heatmap.Panel, stat.Panel, table.Panel)

Bounds = dict[float, str]
"""From which value on which colour; the first one's value is what everything is above."""

GOODPUT_BOUNDS: Bounds = {0: "red", 0.8: "orange", 0.95: "green"}

YES_NO = {"0": ("No", "red"), "1": ("Yes", "green")}


def age(of: str) -> str:
    """Seconds since the newest complete checkpoint was first seen to be complete; `of`: the selector's inside."""
    return f"time() - max by (namespace, job, tier) (surefoot_checkpoint_complete_timestamp_seconds{{{of}}})"


def query(expression: str, legend: str = "") -> prometheus.Dataquery:
    """A time series. `legend`: Grafana's own braces around a label's name."""
    return prometheus.Dataquery().datasource(SOURCE).expr(expression).legend_format(legend).range()


def _framed(panel: _Panel, title: str, about: str, width: int, height: int) -> _Panel:
    """What every kind of panel has alike."""
    return panel.title(title).description(about).datasource(SOURCE).span(width).height(height)


def lines(
    title: str,
    about: str,
    unit: str,
    *queries: prometheus.Dataquery,
    width: int = 8,
    logarithmic: bool = False,
    stacked: Literal["", "bars", "shares"] = "",
    bounds: Bounds | None = None,
) -> timeseries.Panel:
    """Lines over time; series that were 0 all the time are left out of the legend.

    Args:
        title: Name of the panel, one of its own.
        about: Sentence that explains it.
        unit: Grafana's unit of its values.
        queries: What it shows, in the legend's order.
        width: Of the 24 columns.
        logarithmic: For values that differ by orders of magnitude.
        stacked: `bars` on each other, in the order of the queries, or areas as `shares` of their sum.
        bounds: Values from which on something is wrong, drawn as lines.
    """
    panel = (
        _framed(timeseries.Panel(), title, about, width, HEIGHT)
        .unit(unit)
        .fill_opacity(70 if stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .with_override(
            dashboard_models.MatcherConfig("byValue", {"op": "gte", "reducer": "allIsZero", "value": 0}),
            [dashboard_models.DynamicConfigValue("custom.hideFrom", {"legend": True, "tooltip": True, "viz": False})],
        )
    )
    if logarithmic:
        panel.scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10))
    else:
        panel.min(0)
    if stacked == "bars":
        panel.draw_style(common_models.GraphDrawStyle.BARS)
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    elif stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.PERCENT))
    if bounds:
        panel.thresholds(_thresholds(bounds))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED))
    return panel.targets(_lettered(queries))


def heat(title: str, about: str, buckets: str, width: int = 6) -> heatmap.Panel:
    """A histogram over time. `buckets`: the selector of a latency histogram's buckets."""
    expression = f"sum by (le) (increase({buckets}[$__rate_interval]))"
    bucket_query = query(expression, "{{le}}").format(PromQueryFormat.HEATMAP).ref_id("A")
    return (
        _framed(heatmap.Panel(), title, about, width, HEIGHT)
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
        .targets([bucket_query])
    )


def number(
    title: str,
    about: str,
    unit: str,
    *queries: prometheus.Dataquery,
    bounds: Bounds | None = None,
    words: dict[str, tuple[str, str]] | None = None,
    bounds_by_query: tuple[Bounds, ...] = (),
    is_name: bool = False,
    width: int = 4,
) -> stat.Panel:
    """The value now: over a range Grafana would also show the last one of each series that has ended since.

    Args:
        title: Name of the panel, one of its own.
        about: Sentence that explains it.
        unit: Grafana's unit of its values.
        queries: What it shows, as `now` makes them.
        bounds: Colours of all values.
        words: Value -> the word and the colour that stand for it.
        bounds_by_query: Colours of each query's values, where they differ.
        is_name: The legend says everything, and the value is only its colour.
        width: Of the 24 columns.
    """
    panel = (
        _framed(stat.Panel(), title, about, width, STAT_HEIGHT)
        .unit(unit)
        .thresholds(_thresholds(bounds or {0.0: "blue"}))
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .text_mode(common_models.BigValueTextMode.NAME if is_name else common_models.BigValueTextMode.VALUE_AND_NAME)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("none")
        .targets(_lettered(queries))
    )
    if words:
        results = {
            value: dashboard_models.ValueMappingResult(text=text, color=color, index=place)
            for place, (value, (text, color)) in enumerate(words.items())
        }
        panel.mappings([dashboard_models.ValueMap(options=results)])
    for place, query_bounds in enumerate(bounds_by_query):
        own = dashboard_models.DynamicConfigValue("thresholds", _thresholds(query_bounds).build())
        panel.override_by_query(chr(ord("A") + place), [own])
    return panel


def now(expression: str, legend: str) -> prometheus.Dataquery:
    """The newest value alone."""
    return prometheus.Dataquery().datasource(SOURCE).expr(expression).legend_format(legend).instant()


def worst(
    title: str,
    about: str,
    unit: str,
    expression: str,
    column: str,
    ascending: bool = False,
    bounds: Bounds | None = None,
) -> table.Panel:
    """A table of the worst jobs, the worst first; each job's name opens its dashboard.

    Args:
        title: Name of the panel, one of its own.
        about: Sentence that explains it.
        unit: Grafana's unit of its values.
        expression: One series for each job, with the labels `namespace` and `job`.
        column: Head of the column of values.
        ascending: The lowest value is the worst.
        bounds: Colours of the values.
    """
    of_job = "/d/surefoot-checkpoints?var-namespace=${__data.fields.Namespace}&var-job=${__data.fields.Job}&${__url_time_range}"
    link = {"title": "Open the dashboard of this job", "url": of_job}
    names = {"namespace": "Namespace", "job": "Job", "Value": column}
    columns = {
        "excludeByName": {"Time": True},
        "indexByName": {n: i for i, n in enumerate(names)},
        "renameByName": names,
    }
    colored = dashboard_models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"})
    return (
        _framed(table.Panel(), title, about, 12, HEIGHT)
        .unit(unit)
        .no_value("none")
        .thresholds(_thresholds(bounds or {0.0: "text"}))
        .sort_by([common.TableSortByFieldState().display_name(column).desc(not ascending)])
        .override_by_name("Job", [dashboard_models.DynamicConfigValue("links", [link])])
        .override_by_name(column, [colored])
        .with_transformation(dashboard_models.DataTransformerConfig("organize", columns))
        .targets([now(expression, "{{namespace}}/{{job}}").format(PromQueryFormat.TABLE).ref_id("A")])
    )


def _lettered(queries: tuple[prometheus.Dataquery, ...]) -> list[prometheus.Dataquery]:
    return [query.ref_id(chr(ord("A") + place)) for place, query in enumerate(queries)]


def _thresholds(bounds: Bounds) -> dashboard.ThresholdsConfig:
    steps = [
        dashboard_models.Threshold(value=None if place == 0 else value, color=color)
        for place, (value, color) in enumerate(bounds.items())
    ]
    return dashboard.ThresholdsConfig().mode(dashboard_models.ThresholdsMode.ABSOLUTE).steps(steps)


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
