"""The frame of a report: one HTML document that loads nothing, its style, its cards, numbers in words.

Knows no dataset. Light and dark follow the reader's setting; charts are inline SVG from `svg.py`.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import StorageError

if TYPE_CHECKING:
    from brim.report.svg import Plot


def document(title: str, body: str, cards: Sequence[str] = (), foot: str = "") -> str:
    """A page: HTML, cards in columns, HTML; the title is plain text."""
    columns = "\n".join(['<div class="cards">', *cards, "</div>"]) if cards else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n{columns}\n{foot}\n</main>\n</body>\n</html>\n"
    )


def write_page(file: Path, text: str) -> None:
    write_whole(file, text.encode("utf-8", "replace"), "report")


def write_whole(file: Path, data: bytes, field: str) -> None:
    """Write a file whole or not at all; field is the setting that names it."""
    temporary = file.parent / f".{file.name}.{secrets.token_hex(4)}.tmp"
    with write_errors(file, field):
        try:
            temporary.write_bytes(data)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def write_errors(file: Path, field: str) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise StorageError(
            f"{field} {file}: cannot write, {failure.strerror or failure}",
            field=field,
            hint=f"choose another file for {{{field}}}",
        ) from failure


def tiles(entries: list[tuple[str, str, str]]) -> str:
    """Headline numbers: (name, value, note)."""
    cells = "".join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="small">{escape(note)}</dd></div>'
        for name, value, note in entries
    )
    return f'<dl class="tiles">{cells}</dl>'


def card(kind: str, title: str, note: str, body: str = "") -> str:
    """A section with what is seen as its title; the body is HTML, the rest plain text."""
    return f'<section class="card {kind}" id="{kind}"><h2>{escape(title)}</h2>{body}<p>{escape(note)}</p></section>'


def chart(
    kind: str, title: str, note: str, plot: "Plot", labels: tuple[str, str], keys: list[tuple[str, str]] | None = None
) -> str:
    """A card around a plot, whose axes have these labels."""
    return card(kind, title, note, plot.render(*labels, title) + (legend(keys) if keys else ""))


def legend(entries: list[tuple[str, str]]) -> str:
    """Keys of a chart: (class, name)."""
    items = "".join(f'<li><i class="key {kind}"></i>{escape(name)}</li>' for kind, name in entries)
    return f'<ul class="legend">{items}</ul>'


def table(rows: list[list[Any]], head: list[str] | None = None) -> str:
    """A table; without a head the first column names the rows."""
    top = f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr></thead>" if head else ""
    lines = []
    for row in rows:
        cells = [f"<td>{escape(plain(value))}</td>" for value in row]
        if head is None:
            cells[0] = f"<th>{escape(plain(row[0]))}</th>"
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{top}<tbody>{''.join(lines)}</tbody></table>"


# Numbers in words


def number(value: float | None) -> str:
    """Three digits, or all of a whole number, with thin spaces between thousands."""
    if value is None or value != value:
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 999.5 or value == round(value) else f"{value:.3g}"
    return text.replace(",", "\u202f").replace("-", "−")


def metres(value: float | None) -> str:
    if value is not None and abs(value) >= 999.5:
        return f"{number(value / 1000)}\u00a0km"
    return with_unit(value, "m")


def with_unit(value: float | None, unit: str) -> str:
    """A number that stays on one line with its unit."""
    return "–" if value is None else f"{number(value)}\u00a0{unit}"


def count(value: int | None, noun: str) -> str:
    return f"{number(value)} {noun}{'' if value == 1 else 's'}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.3g}\u00a0%"


def size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 999.5:
            return f"{number(num_bytes)}\u00a0{unit}"
        num_bytes /= 1024
    return f"{number(num_bytes)}\u00a0TiB"


def plain(value: Any) -> str:
    """A configuration value as a reader would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, int | float) and (value == 0 or 1e-3 <= abs(value) < 1e12):
        from brim.report.svg import tick_text  # loads NumPy, which pages without charts do not need

        return tick_text(value) if value == round(value) else f"{value:.7g}".replace("-", "−")
    return str(value)


_STYLE = """
:root{color-scheme:light dark;--page:#f6f6f3;--card:#fff;--ink:#14140f;--soft:#56554f;--faint:#8b8a83;--grid:#e6e5df;
--edge:#dddcd5;--a:#2a78d6;--b:#e2571e;--c:#1baf7a;--d:#eda100;--e:#8250c8;
--s0:#9cc5f5;--s1:#5d9fea;--s2:#2a78d6;--s3:#1a569f;--s4:#0c2f5e;--site:#e2571e;--band:#2a78d61a}
@media (prefers-color-scheme:dark){:root{--page:#0e0e0d;--card:#191918;--ink:#f7f7f4;--soft:#c3c2b7;--faint:#8f8e86;
--grid:#2b2b29;--edge:#30302d;--a:#4a93ec;--b:#f0743c;--c:#1fa876;--d:#d39a1a;--e:#a986e8;
--s0:#2a5ea8;--s1:#3d80d6;--s2:#6aa8f2;--s3:#a5cbf8;--s4:#e3effd;--site:#f0743c;--band:#4a93ec2b}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1160px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
header p{margin:0;color:var(--soft)}
.badge{display:inline-block;margin-top:8px;padding:2px 10px;border-radius:99px;border:1px solid var(--b);color:var(--b)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:1px;margin:20px 0 16px;
background:var(--edge);border:1px solid var(--edge);border-radius:12px;overflow:hidden}
.tiles div{background:var(--card);padding:12px 14px}
.tiles dt{color:var(--soft);font-size:13px;line-height:1.35}
.tiles dd{margin:0;font-size:22px;font-weight:600;line-height:1.3;white-space:nowrap}
.tiles .small{color:var(--faint);font-size:13px;font-weight:400;line-height:1.35;white-space:normal}
.cards{columns:2 440px;column-gap:16px;margin-bottom:16px}
.cards .card{break-inside:avoid;margin:0 0 16px}
.card{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:16px 18px;min-width:0}
.card h2{font-size:16px;line-height:1.35;margin:0 0 10px}
.card p{margin:8px 0 0;color:var(--soft);font-size:13px}
svg{display:block;width:100%;height:auto}
svg text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .label{fill:var(--soft)}
svg .name{fill:var(--ink);font-size:13px}
svg .note{fill:var(--soft);paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
svg .town{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:3.5px;
stroke-linejoin:round}
svg .grid{stroke:var(--grid);fill:none}
svg .land{fill:var(--faint);fill-rule:evenodd;opacity:.16}
svg .coast{stroke:var(--faint);stroke-width:1.2;fill:none}
svg .border{stroke:var(--faint);stroke-dasharray:4 3;fill:none;opacity:.7}
svg .axis,svg .edge{stroke:var(--edge);fill:none}
svg .rule,svg .box{stroke:var(--faint);stroke-dasharray:4 4;fill:none}
svg .band{fill:var(--band)}
svg .track{fill:var(--grid)}
svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}
svg .dots{fill:none;stroke-width:4.5;stroke-linecap:round;stroke-opacity:.85}
svg path.site{fill:var(--site);stroke:var(--card);stroke-width:1.5}
svg .dots.site{fill:none;stroke:var(--site);stroke-width:2.5;stroke-opacity:.6}
.fill.a,.key.a{fill:var(--a);background:var(--a)}.line.a{stroke:var(--a)}
.fill.b,.key.b{fill:var(--b);background:var(--b)}.line.b{stroke:var(--b)}
.fill.c,.key.c{fill:var(--c);background:var(--c)}.fill.d,.key.d{fill:var(--d);background:var(--d)}
.key.e{background:var(--e)}.line.c{stroke:var(--c)}.line.d{stroke:var(--d)}.line.e{stroke:var(--e)}
.dots.a{stroke:var(--a)}.dots.b{stroke:var(--b)}.dots.c{stroke:var(--c)}.a{--k:var(--a)}.c{--k:var(--c)}
svg .dots.fine{stroke-width:3.4;stroke-opacity:.6}svg .line.thin{stroke-width:1;stroke-opacity:.75}
svg .line.off{stroke:var(--soft);stroke-width:1;stroke-opacity:.7}svg .tick{stroke:var(--ink);stroke-width:1.5}
.s0{stroke:var(--s0);--k:var(--s0)}.s1{stroke:var(--s1);--k:var(--s1)}.s2{stroke:var(--s2);--k:var(--s2)}
.s3{stroke:var(--s3);--k:var(--s3)}.s4{stroke:var(--s4);--k:var(--s4)}.site{--k:var(--site)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0 0;padding:0;list-style:none;color:var(--soft);
font-size:13px}
.legend li{display:flex;align-items:center;gap:6px;white-space:nowrap}
.key{width:12px;height:12px;border-radius:3px;flex:none}
.key.stroke{height:3px}
.key.rule{width:18px;height:0;border-top:2px dashed var(--faint);border-radius:0}
.key.off{height:2px;background:var(--soft)}.key.ring{background:none;border:1.5px solid var(--c);border-radius:50%}
.key.tick{width:2px;background:var(--ink);border-radius:0}
.key.dot{width:9px;height:9px;border-radius:50%;background:var(--k)}
.key.tri{background:var(--site);border-radius:0;clip-path:polygon(50% 0,100% 100%,0 100%)}
summary{cursor:pointer;font-weight:600}
.tables{display:flex;flex-wrap:wrap;gap:16px 40px;margin-top:12px;overflow-x:auto}
table{border-collapse:collapse;font-size:13px;align-self:start}
th,td{text-align:left;font-weight:400;padding:3px 18px 3px 0;border-bottom:1px solid var(--grid);overflow-wrap:anywhere}
th{color:var(--soft)}
.wide{overflow-x:auto}.wide table{width:100%}.wide th,.wide td{white-space:nowrap}
#baselines{margin-bottom:16px}
@media (max-width:560px){main{padding:18px 12px 32px}.card{padding:14px 12px}
svg text{font-size:15px}svg .name{font-size:15px}
.tiles{grid-template-columns:repeat(2,1fr)}}
"""
