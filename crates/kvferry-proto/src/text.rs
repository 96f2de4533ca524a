//! Text from a peer, made safe to print.

/// `text` cut to at most `max_bytes` bytes at a character boundary, control characters replaced.
///
/// A peer's name ends up in logs and terminals: it must be neither long nor an escape sequence,
/// and must not reorder the line it is printed in.
pub(crate) fn sanitized(text: &str, max_bytes: usize) -> String {
    let mut shown = String::with_capacity(text.len().min(max_bytes));
    for c in text.chars() {
        let c = if is_unprintable(c) { '\u{fffd}' } else { c };
        if shown.len() + c.len_utf8() > max_bytes {
            break;
        }
        shown.push(c);
    }
    shown
}

/// `text` cut to at most `max_bytes` bytes at a character boundary.
pub(crate) fn truncated(text: &str, max_bytes: usize) -> &str {
    let end = (0..=max_bytes.min(text.len())).rfind(|&at| text.is_char_boundary(at));
    &text[..end.expect("zero is a boundary of every text")]
}

fn is_unprintable(c: char) -> bool {
    // Beyond control characters: the line separators, and the marks that change the direction or
    // join invisibly.
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || c == '\u{feff}'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_and_excess_length_never_reach_the_reader() {
        assert_eq!(sanitized("a\x1b[2Jb\n\u{202e}", 100), "a\u{fffd}[2Jb\u{fffd}\u{fffd}");
        assert_eq!(sanitized("äöü", 5), "äö");
        assert_eq!(truncated("äöü", 5), "äö");
        assert_eq!(truncated("abc", 5), "abc");
    }
}
