//! The report as text: groups of aligned lines.

use std::io::IsTerminal;

use comfy_table::presets::NOTHING;
use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width};

use super::finding::{Group, Mark, Report};

/// Width of the narrowest text. The terminal breaks the lines if it is narrower.
const NARROWEST: usize = 60;
/// The widest text; also the width for a pipe.
const WIDEST: usize = 120;

/// Width and colours.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    pub(super) width: usize,
    pub(super) colour: bool,
}

impl Style {
    /// Style for standard output.
    pub(super) fn here() -> Style {
        let out = std::io::stdout();
        let terminal = out.is_terminal();
        let columns = rustix::termios::tcgetwinsize(&out).map_or(0, |size| size.ws_col);
        let width = match usize::from(columns) {
            0 => WIDEST,
            columns => columns.clamp(NARROWEST, WIDEST),
        };
        let unset = |name| std::env::var_os(name).is_none_or(|value| value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Style { width, colour: terminal && unset("NO_COLOR") && !dumb }
    }

    fn painted(self, mark: Mark, text: &str) -> String {
        let colour = match mark {
            Mark::Ok => "32",
            Mark::Note => "33",
            Mark::Missing => "36",
            Mark::Bad => "1;31",
        };
        if self.colour { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn title(self, text: &str) -> String {
        if self.colour { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }
}

pub(super) fn text(report: &Report, style: Style) -> String {
    let about = match &report.target {
        Some(target) => format!("{target}, seen from here"),
        None => "this host".to_owned(),
    };
    let mut text = format!("kvferry {}: {about}\n", report.version);
    let all = || report.groups.iter().flat_map(|group| &group.findings);
    let subject = all().map(|finding| finding.subject.chars().count()).max().unwrap_or(0);
    for group in &report.groups {
        text.push_str(&format!("\n{}\n", style.title(&group.title)));
        text.push_str(&lines(group, subject, style));
    }
    let counts: Vec<String> = report
        .counts
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(mark, count)| style.painted(*mark, &format!("{count} {}", mark.name())))
        .collect();
    text.push_str(&format!("\n{}\n", counts.join(", ")));
    text
}

fn lines(group: &Group, subject: usize, style: Style) -> String {
    const MARK: usize = "missing".len();
    let mut table = Table::new();
    table
        .load_style(NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(u16::try_from(style.width).unwrap_or(u16::MAX));
    for finding in &group.findings {
        let mut words = finding.finding.clone();
        if let Some(fix) = &finding.fix {
            words.push_str(&format!("\n→ {fix}"));
        }
        table.add_row([finding.mark.name(), &finding.subject, &words]);
    }
    for (column, width) in table.column_iter_mut().zip([MARK + 2, subject + 2]) {
        let width = u16::try_from(width).unwrap_or(u16::MAX);
        column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(width)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    if let Some(mark) = table.column_mut(0) {
        mark.set_padding((2, 2)).set_constraint(ColumnConstraint::Absolute(Width::Fixed(
            u16::try_from(MARK + 4).unwrap_or(u16::MAX),
        )));
    }
    let marked = |line: &str| {
        let mark = Mark::ALL
            .into_iter()
            .find(|mark| line.strip_prefix("  ").is_some_and(|rest| rest.starts_with(mark.name())));
        match mark {
            Some(mark) => {
                let (name, rest) = line.split_at(2 + mark.name().len());
                format!("  {}{}\n", style.painted(mark, &name[2..]), rest.trim_end())
            }
            None => format!("{}\n", line.trim_end()),
        }
    };
    table.trim_fmt().lines().map(marked).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Finding;

    fn report() -> Report {
        let long = "many words that do not fit into one line of a terminal of eighty columns, so \
                    that they have to go on in the next";
        Report::new(
            None,
            vec![Group {
                name: "some",
                title: "Some things".into(),
                findings: vec![
                    Finding::ok("first", "fine"),
                    Finding::bad("a_longer_one", long).fix("do this"),
                ],
            }],
        )
    }

    #[test]
    fn lines_are_aligned_and_no_longer_than_the_terminal() {
        for width in [80, 100, 120] {
            let text = text(&report(), Style { width, colour: false });
            assert!(text.lines().all(|line| line.chars().count() <= width), "{text}");
            let column = |word: &str| {
                let line = text.lines().find(|line| line.contains(word));
                line.unwrap_or_else(|| panic!("{word} in {text}")).find(word)
            };
            assert_eq!(column("fine"), column("many words"), "{text}");
            assert_eq!(column("fine"), column("→ do this"), "{text}");
            assert!(text.contains("\n  bad      a longer one"), "{text}");
            assert!(text.ends_with("\n1 ok, 1 bad\n"), "{text}");
        }
    }

    #[test]
    fn colour_changes_nothing_but_the_colour() {
        let plain = text(&report(), Style { width: 80, colour: false });
        let mut coloured = text(&report(), Style { width: 80, colour: true });
        assert!(coloured.contains("\x1b[1;31mbad\x1b[0m") && !plain.contains('\x1b'));
        for code in ["\x1b[1;31m", "\x1b[32m", "\x1b[1m", "\x1b[0m"] {
            coloured = coloured.replace(code, "");
        }
        assert_eq!(plain, coloured);
    }
}
