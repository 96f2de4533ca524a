//! A page with pictures that loads nothing: no script, no font, no file.

use super::canvas::{Canvas, escape};
use super::style::{PAGE, SVG};

/// Content of a page, from top to bottom.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are the parts of the page")]
pub struct Page<'a> {
    pub title: &'a str,
    /// A line each, as text.
    pub facts: &'a [String],
    /// Whether all is well, and a sentence that says so or why not.
    pub verdict: (bool, &'a str),
    /// HTML between the verdict and the pictures.
    pub summary: &'a str,
    pub pictures: Vec<&'a Canvas>,
    /// HTML after the pictures.
    pub details: &'a str,
    /// Method of the measurement, as text.
    pub method: &'a str,
}

impl Page<'_> {
    /// The page's HTML.
    pub fn html(&self) -> String {
        let Page { title, summary, details, verdict: (ok, verdict), .. } = self;
        let class = if *ok { "ok" } else { "short" };
        let facts = self.facts.iter().map(|it| format!("<p class=\"soft\">{}</p>\n", escape(it)));
        let pictures = self.pictures.iter().map(|it| format!("<figure>{}</figure>\n", it.inline()));
        let (facts, mut pictures): (String, String) = (facts.collect(), pictures.collect());
        if !pictures.is_empty() {
            pictures = format!("<h2>Figures</h2><div class=\"figures\">\n{pictures}</div>\n");
        }
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{title}</title><style>{PAGE}{SVG}</style></head><body><main>\n\
             <h1>{title}</h1>\n{facts}<p class=\"verdict {class}\">{}</p>\n{summary}{pictures}{details}\
             <h2>Method</h2><p class=\"soft wide\">{}</p>\n</main></body></html>\n",
            escape(verdict),
            escape(self.method)
        )
    }
}
