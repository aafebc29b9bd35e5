"""Tables of the figures, as Markdown, and their place in docs/performance/cpu.md."""

import re
import statistics

BEGIN, END = "<!-- measured: scripts/cpu-bench --keep writes what is below -->\n", "<!-- end of what it writes -->\n"
PEER = "llama.cpp"
SERVED = {"out": ("output tokens/s", "{:,.0f}"), "ttft": ("first token, median ms", "{:,.0f}"),
          "start": ("start to first token, s", "{:.2f}"), "rss": ("peak memory, MiB", "{:,.0f}")}


def write(path, text):
    page = path.read_text()
    before, rest = page.split(BEGIN)
    path.write_text(before + BEGIN + text + rest[rest.index(END):])


def render(results):
    sides = sides_of(results)
    parts = [machine(results)]
    if results["steps"]:
        parts += [steps(results, sides), bounds(results, sides)]
    parts += [served(name, levels, sides) for name, levels in results["served"].items()]
    if results["refused"]:
        parts.append("Not measured: " + "; ".join(f"{key} ({said})" for key, said in results["refused"].items()) + ".")
    return "\n\n".join(parts) + "\n"


def sides_of(results):
    """Sides that have a figure, in the order of the versions."""
    return [name for name in results["versions"] if any(name in figure for figure in figures_of(results))]


def figures_of(results):
    for model in results["steps"].values():
        yield from model["figures"].values()
    for levels in results["served"].values():
        for level in levels.values():
            yield from level["figures"].values()


def machine(results):
    quiet, about = results["quiet"], results["machine"]
    lines = [f"{results['day']}, {results['threads']} threads. {about['Model name']}, {about['CPU(s)']} cores, "
             f"{about.get('Hypervisor vendor', 'no')} hypervisor; caches L1d {about.get('L1d cache', '?')}, "
             f"L2 {about.get('L2 cache', '?')}, L3 {about.get('L3 cache', '?')}; {about['has']}. Linux {about['kernel']}.", ""]
    lines += [f"* {name}: {version}" + (f", flags `{flags}`" if flags else "")
              for name, (version, flags) in results["versions"].items()]
    lines += [f"* Measurements: {quiet['accepted']} that count, {quiet['rejected']} rejected and repeated (steal above "
              f"{quiet['steal_max']:.0%} or other programs above {quiet['foreign_max']:.0%} of the cores); of those that count "
              f"at most {quiet['steal']:.1%} steal and {quiet['foreign']:.1%} of other programs."]
    rounds = sorted({len(values) for figure in figures_of(results) for values in figure.values()})
    lines += [f"* Rounds of a figure, whose median it is: {' to '.join(map(str, sorted({*rounds[:1], *rounds[-1:]})))}."]
    return "\n".join(lines)


def steps(results, sides):
    rows = []
    for name, model in results["steps"].items():
        for figure, values in model["figures"].items():
            rows.append([name, label(figure, model), *cells(values, sides, "{:,.0f}" if figure == "prefill" else "{:,.1f}"),
                         *ratios(values, sides)])
    return table(["tokens/s", "", *sides, *ratio_names(sides)], rows)


def bounds(results, sides):
    """What each figure is of the most that this processor could."""
    rows = []
    for name, model in results["steps"].items():
        for figure, values in model["figures"].items():
            most, why = ceiling(figure, model)
            if most:
                shares = [f"{median(values[side]) / most:.0%}" if side in values else "" for side in sides]
                rows.append([name, label(figure, model), f"{most:,.0f}", why, *shares])
    if not rows:
        return "Ceilings were not measured."
    return table(["achieved / ceiling", "", "ceiling, tokens/s", "of", *sides], rows)


def ceiling(figure, model):
    limits = {name: median(values) for name, values in model["ceilings"].items()}
    if figure == "decode" and "read_gb_s" in limits:
        return 1e9 * limits["read_gb_s"] * model["rows"] / model["bytes"], f"memory, {limits['read_gb_s']:.1f} GB/s"
    kind = "int8" if model["is_quantised"] else "f32"
    if figure == "prefill" and f"{kind}_gop_s" in limits:
        rate = limits[f"{kind}_gop_s"]
        return 1e9 * rate / (2 * model["products"]), f"{kind} products, {rate:,.0f} Gop/s"
    return None, ""


def label(figure, model):
    return "prefill 512" if figure == "prefill" else f"decode, batch {model['rows']}"


def served(name, levels, sides):
    rows = []
    for level, about in levels.items():
        for figure, values in about["figures"].items():
            title, form = SERVED[figure]
            rows.append([f"{level} in flight", title, *cells(values, sides, form), *ratios(values, sides)])
    flags = {level: about["variants"] for level, about in levels.items() if about["variants"]}
    said = "; ".join(f"{level} in flight: " + ", ".join(f"{side} `{flag}`" for side, flag in chosen.items())
                     for level, chosen in flags.items())
    below = f"\n\nThe better flags of the first round: {said}." if said else ""
    return f"{name}, served, 128 tokens in and 64 out:\n\n" + table(["", "", *sides, *ratio_names(sides)], rows) + below


def ratio_names(sides):
    return [f"{side} / {PEER}" for side in sides if side != PEER] if PEER in sides else []


def ratios(values, sides):
    if PEER not in sides:
        return []
    both = [(side in values and PEER in values, side) for side in sides if side != PEER]
    return [f"{median(values[side]) / median(values[PEER]):.2f}" if have else "" for have, side in both]


def cells(values, sides, form):
    return [form.format(median(values[side])) if side in values else "" for side in sides]


def median(values):
    return statistics.median(values)


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def about_machine(lscpu, kernel):
    about = dict(re.split(r":\s+", line, maxsplit=1) for line in lscpu.splitlines() if re.search(r":\s+\S", line))
    flags = about.get("Flags", "").split()
    known = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"]
    about["has"] = ", ".join(flag for flag in known if flag in flags) or "none of the vector instructions asked about"
    about["kernel"] = kernel
    wanted = ["Model name", "CPU(s)", "CPU family", "Model", "Hypervisor vendor", "L1d cache", "L2 cache", "L3 cache",
              "has", "kernel"]
    return {key: about[key] for key in wanted if key in about}
