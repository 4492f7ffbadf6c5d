"""The view of a server."""

import pytest

from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.report import html_of
from dpro.extensions.serving.answers import sent_with_server
from dpro.extensions.serving.latency import PARTS
from dpro.extensions.serving.view import VIEW, latency_info, nothing_served, waits_figure, waits_info
from dpro.verdict.report import make_report
from tests.unit.extensions.serving.test_serving import ASKED, SERVED, run_of


def test_a_bar_of_each_request_is_as_long_as_its_latency(tmp_path):
    loaded = Loaded(run_of(tmp_path, requests=ASKED, iterations=SERVED))
    rows = waits_info(loaded, Link())
    figure = waits_figure(rows, "light")
    assert [bar.name for bar in figure.data] == [part.removesuffix("_ms") for part in PARTS]
    lengths = [sum(bar.x[at] for bar in figure.data) for at in range(rows.height)]
    assert lengths == pytest.approx(rows["latency_ms"].to_list())
    assert latency_info(loaded, Link())["measure"].to_list() == ["ttft", "tpot", "queue", "latency"]


@pytest.mark.parametrize("tables", [{"requests": ASKED}, {"iterations": SERVED}])
def test_sections_fill_with_one_table_alone(tmp_path, tables):
    loaded = Loaded(run_of(tmp_path, **tables))
    assert not nothing_served(loaded, Link())
    assert all(fill(loaded, Link()) for fill in VIEW.sections.values())


def test_a_report_to_send_draws_what_requests_waited_for(tmp_path):
    loaded = Loaded(run_of(tmp_path, requests=ASKED, iterations=SERVED))
    made = sent_with_server(make_report(loaded), loaded.run)
    page = html_of(loaded, made)
    assert "The slowest requests of the server, and what they waited for" in page
    assert made.findings[0].meaning.split(":")[0] in page
