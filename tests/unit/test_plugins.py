"""Entry points of other distributions."""

from dpro.plugins import entries_of


def test_entry_points_of_a_group_are_found_by_name_and_a_distribution_counts_once(monkeypatch, tmp_path):
    for folder in ("first", "second"):
        info = tmp_path / folder / "sparks-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sparks\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            "[dpro.sparks]\nzeta = z:Z\nalpha = a:A\n[other]\nbeta = b:B\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    found = [(entry.name, entry.value) for entry in entries_of("dpro.sparks")]
    assert found == [("alpha", "a:A"), ("zeta", "z:Z")]
