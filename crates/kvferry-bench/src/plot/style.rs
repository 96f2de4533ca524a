//! The look of each subject. Colours are of Okabe and Ito's set, which most colour-blind people tell
//! apart; each line has its own mark, too. The machine's limits are grey.

/// Look of a subject in pictures.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    /// The title of its column.
    pub(crate) who: &'static str,
    /// Name of the subject in a legend.
    pub(crate) name: &'static str,
    pub(crate) class: &'static str,
    pub(crate) shape: usize,
}

const fn look(who: &'static str, name: &'static str, class: &'static str, shape: usize) -> Look {
    Look { who, name, class, shape }
}

/// Looks in the order of a legend. `memcpy` is not drawn: it is so fast that it would compress all others.
const LOOKS: [Look; 12] = [
    look("kvferry", "kvferry", "ours", 0),
    look("kvferry, allocated", "kvferry, own memory", "shared", 3),
    look("kvferry, Python", "kvferry from Python", "python", 2),
    look("checksums", "kvferry, checksums", "checked", 1),
    look("Mooncake", "Mooncake", "mooncake", 3),
    look("Mooncake, queue 65535", "Mooncake, queue 65535", "mooncake2", 1),
    look("NIXL", "NIXL", "nixl", 4),
    look("NIXL, tuned", "NIXL, tuned", "nixl2", 2),
    look("floor", "floor program", "limit floor", 0),
    look("raw", "one raw stream", "limit raw", 0),
    look("raw × 4", "four raw streams", "limit raw4", 0),
    look("process_vm", "process_vm by itself", "limit floor", 0),
];

impl Look {
    /// Whether it is a limit of the machine.
    pub(crate) fn is_limit(self) -> bool {
        self.class.starts_with("limit")
    }
}

/// The looks of the subjects that `who` accepts, in the order of a legend.
pub(crate) fn looks(who: impl Fn(&str) -> bool) -> Vec<Look> {
    LOOKS.into_iter().filter(|look| who(look.who)).collect()
}

/// The style sheet of pictures.
pub(crate) const SVG: &str = "
.chart { --paper: #ffffff; --ink: #1c2430; --soft: #5c6675; --grid: #e4e8ee; --limit: #8a94a3;
  --ours: #0072b2; --shared: #009e73; --python: #3fa3df; --checked: #009e73; --mooncake: #d55e00;
  --mooncake2: #c98a00; --nixl: #b3579a; --nixl2: #6a3d9a; }
@media (prefers-color-scheme: dark) {
.chart { --paper: #161b22; --ink: #e8edf4; --soft: #9aa6b6; --grid: #2a323d; --limit: #7d8999;
  --ours: #58b4f5; --shared: #35c89b; --python: #a5d8fb; --checked: #35c89b; --mooncake: #ff8b4a;
  --mooncake2: #f3c04b; --nixl: #e896cf; --nixl2: #b79af0; } }
.chart text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif; fill: var(--ink); font-size: 13px; }
.chart .heading { font-size: 17px; font-weight: 650; }
.chart .sub, .chart .tick, .chart .axis { fill: var(--soft); }
.chart .tick { font-size: 12px; font-variant-numeric: tabular-nums; }
.chart .small { font-size: 11px; }
.chart .paper { fill: var(--paper); }
.chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .base { stroke: var(--soft); stroke-width: 1.2; }
.chart polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart .whisker { stroke-width: 1.4; opacity: .75; }
.chart .range { stroke-width: 3; opacity: .45; stroke-linecap: round; }
.chart .leader { stroke-width: 1; opacity: .5; }
.chart .mark { stroke: var(--paper); stroke-width: 1.2; }
.chart .hollow { fill: var(--paper); stroke-width: 2; }
.chart .ours { stroke: var(--ours); } .chart .shared { stroke: var(--shared); }
.chart .python { stroke: var(--python); } .chart .checked { stroke: var(--checked); }
.chart .mooncake { stroke: var(--mooncake); } .chart .mooncake2 { stroke: var(--mooncake2); }
.chart .nixl { stroke: var(--nixl); } .chart .nixl2 { stroke: var(--nixl2); }
.chart .limit { stroke: var(--limit); }
.chart polyline.ours { stroke-width: 3.2; }
.chart polyline.floor { stroke-dasharray: 7 4; } .chart polyline.raw { stroke-dasharray: 1.5 4.5; }
.chart polyline.raw4 { stroke-dasharray: 9 4 1.5 4; }
.chart .mark.ours { fill: var(--ours); } .chart .mark.shared { fill: var(--shared); }
.chart .mark.python { fill: var(--python); } .chart .mark.checked { fill: var(--checked); }
.chart .mark.mooncake { fill: var(--mooncake); } .chart .mark.mooncake2 { fill: var(--mooncake2); }
.chart .mark.nixl { fill: var(--nixl); } .chart .mark.nixl2 { fill: var(--nixl2); }
.chart .mark.limit { fill: var(--limit); }
.chart .mark { stroke: var(--paper); }
.chart .point { fill: transparent; stroke: none; }
.chart text.ours { fill: var(--ours); stroke: none; font-weight: 650; }
.chart text.label { stroke: none; }
.chart .bar { fill: var(--ours); } .chart .cap { stroke: var(--limit); stroke-width: 2.5; stroke-dasharray: 6 4; }
.chart .value { font-size: 12px; font-variant-numeric: tabular-nums; }
.chart .beside { fill: var(--soft); font-size: 12px; }
";

/// The style sheet of pages.
pub(crate) const PAGE: &str = "
:root { color-scheme: light dark; --back: #f4f6f9; --card: #ffffff; --ink: #1c2430; --soft: #5c6675;
  --edge: #dfe4eb; --good: #00795a; --bad: #b3261e; --goodback: #e2f4ee; --badback: #fbe7e5; --stripe: #f8fafc; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --card: #161b22; --ink: #e8edf4;
  --soft: #9aa6b6; --edge: #2a323d; --good: #4cd6a8; --bad: #ff8f86; --goodback: #10352a;
  --badback: #45201d; --stripe: #1a2029; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif; }
main { max-width: 1500px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 20px; margin: 44px 0 14px; }
h3 { font-size: 15px; margin: 26px 0 8px; }
p { margin: 4px 0; } .soft { color: var(--soft); } p.wide { max-width: 92ch; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 14px; margin-top: 22px; }
.tile { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; padding: 14px 18px; }
.tile b { display: block; font-size: 30px; line-height: 1.15; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.verdict { display: inline-block; margin-top: 14px; padding: 8px 14px; border-radius: 8px; font-weight: 600; }
.verdict.ok { background: var(--goodback); color: var(--good); }
.verdict.short { background: var(--badback); color: var(--bad); }
.figures { display: grid; gap: 18px; grid-template-columns: repeat(auto-fit, minmax(min(620px, 100%), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 12px; padding: 8px; }
svg.chart { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 14px; text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--edge); }
th:first-child, td:first-child { text-align: left; }
tbody tr:nth-child(even) { background: var(--stripe); }
td.ok { color: var(--good); font-weight: 600; } td.short { color: var(--bad); font-weight: 700; }
td.mine { font-weight: 650; } td.failed { color: var(--bad); }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); padding: 4px 0; }
ul { padding-left: 20px; margin: 6px 0; }
";
