//! An SVG under construction.

use std::fmt::Write;

/// A picture: elements in the order in which they are drawn.
#[derive(Debug)]
pub struct Canvas {
    width: f64,
    height: f64,
    title: String,
    body: String,
}

/// The point of a text that its position names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

impl Canvas {
    /// Makes a picture with its heading. Screen readers say the title, too.
    pub(crate) fn new(width: f64, height: f64, title: &str, subtitle: &str) -> Canvas {
        let mut canvas = Canvas { width, height, title: escape(title), body: String::new() };
        canvas.text("heading", (20.0, 32.0), Anchor::Start, title);
        canvas.text("sub", (20.0, 53.0), Anchor::Start, subtitle);
        canvas
    }

    fn push(&mut self, arguments: std::fmt::Arguments<'_>) {
        self.body.write_fmt(arguments).expect("memory takes it");
        self.body.push('\n');
    }

    pub(crate) fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.push(format_args!(
            r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
        ));
    }

    pub(crate) fn polyline(&mut self, class: &str, points: &[(f64, f64)]) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let points = points.join(" ");
        self.push(format_args!(r#"<polyline class="{class}" points="{points}"/>"#));
    }

    pub(crate) fn text(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escape(text);
        self.push(format_args!(
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#
        ));
    }

    /// A horizontal line of the grid, with the number that it stands for.
    pub(crate) fn level(&mut self, (left, right): (f64, f64), y: f64, number: &str) {
        self.line("grid", (left, y), (right, y));
        self.text("tick", (left - 8.0, y + 4.0), Anchor::End, number);
    }

    /// An upright rectangle, with words that appear when it is pointed at.
    pub(crate) fn bar(
        &mut self,
        class: &str,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        says: &str,
    ) {
        let says = escape(says);
        self.push(format_args!(
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" rx="2"><title>{says}</title></rect>"#
        ));
    }

    /// A mark of one of a few shapes, with words that appear when it is pointed at.
    pub(crate) fn mark(&mut self, class: &str, shape: usize, (x, y): (f64, f64), says: &str) {
        let size = 4.6;
        let says = escape(says);
        let around = |corners: &[(f64, f64)]| {
            let corners = corners.iter().map(|(dx, dy)| format!("{:.1},{:.1}", x + dx, y + dy));
            corners.collect::<Vec<_>>().join(" ")
        };
        let polygon = |corners: &[(f64, f64)]| {
            let points = around(corners);
            format!(r#"<polygon class="{class}" points="{points}"><title>{says}</title></polygon>"#)
        };
        let (wide, tall) = (size * 1.15, size * 1.3);
        let shape = match shape {
            0 => format!(
                r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="{size}"><title>{says}</title></circle>"#
            ),
            1 => polygon(&[(0.0, -tall), (tall, 0.0), (0.0, tall), (-tall, 0.0)]),
            2 => polygon(&[(0.0, -tall), (wide, size), (-wide, size)]),
            3 => polygon(&[(-size, -size), (size, -size), (size, size), (-size, size)]),
            _ => polygon(&[(0.0, tall), (wide, -size), (-wide, -size)]),
        };
        self.push(format_args!("{shape}"));
    }

    /// SVG for a page that has the style sheet.
    pub(crate) fn inline(&self) -> String {
        self.wrapped("")
    }

    /// SVG for a file of its own, with the style sheet.
    pub(crate) fn file(&self) -> String {
        let head = r#"<?xml version="1.0" encoding="UTF-8"?>"#;
        format!("{head}\n{}", self.wrapped(&format!("<style>{}</style>\n", super::style::SVG)))
    }

    fn wrapped(&self, head: &str) -> String {
        let Canvas { width, height, title, body } = self;
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">
{head}<title>{title}</title>
<rect class="paper" width="{width}" height="{height}" rx="10"/>
{body}</svg>
"#
        )
    }
}

/// Text as XML and HTML take it.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}
