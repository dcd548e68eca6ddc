"""The course of a run as a picture, where matplotlib is installed."""

from pathlib import Path

from dgemma.train.report import Metrics

HOW_TO = "install matplotlib for a plot of the losses: pip install 'dgemma[train]'"
LINES = {"denoise": "canvases", "causal": "next token"}


def plot_losses(directory: Path) -> Path | None:
    """Draw the losses of a run's metrics to `loss.svg` beside them; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = Metrics(directory).read()
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [line["step"] for line in lines]
    for name, label in LINES.items():
        axes.plot(steps, [line[name] for line in lines], label=label)
    axes.set(xlabel="step", ylabel="cross-entropy, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    path = directory / "loss.svg"
    figure.savefig(path)
    return path
