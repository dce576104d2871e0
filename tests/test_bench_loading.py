"""bench/loading.py on tiny data: every loader trains, and the shares match the times."""

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("timm")


def test_every_loader(bench_script):
    status, rows = bench_script("loading")("--mode", "hfnn")
    assert status == 0
    assert [row["provider"] for row in rows] == ["memory"] + [
        name for name in ("imagefolder", "hfrecord", "hfrecord-pixels") for _ in range(2)
    ]
    alone = float(rows[0]["device_us"])
    for row in rows:
        assert float(row["images_per_s"]) == pytest.approx(4e6 / float(row["device_us"]), rel=1e-3)
        assert float(row["waits"]) == pytest.approx(max(0, 1 - alone / float(row["device_us"])), abs=1e-3)
