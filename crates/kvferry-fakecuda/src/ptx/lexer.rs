//! Words and marks of PTX text, with their lines.

/// A word (names, directives, numbers, registers) or one mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token {
    Word(String),
    Mark(char),
}

impl Token {
    pub(super) fn is(&self, mark: char) -> bool {
        *self == Self::Mark(mark)
    }
}

/// All tokens, each with its line, the first line being 1. Comments are gone.
pub(super) fn tokens(text: &str) -> Vec<(Token, u32)> {
    let mut found = Vec::new();
    let mut line = 1;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\n' => line += 1,
            c if c.is_whitespace() => {}
            '/' if chars.peek() == Some(&'/') => {
                while chars.peek().is_some_and(|&c| c != '\n') {
                    chars.next();
                }
            }
            '/' if chars.peek() == Some(&'*') => {
                let mut last = ' ';
                for c in chars.by_ref() {
                    line += u32::from(c == '\n');
                    if last == '*' && c == '/' {
                        break;
                    }
                    last = c;
                }
            }
            '"' => {
                let quoted: String = chars.by_ref().take_while(|&c| c != '"').collect();
                found.push((Token::Word(format!("\"{quoted}")), line));
            }
            c if is_word(c) => {
                let mut word = String::from(c);
                while let Some(&c) = chars.peek() {
                    // `.L2::128B` is one word; a label's colon is a mark.
                    let inner = c == ':' && {
                        let mut ahead = chars.clone();
                        ahead.next();
                        ahead.peek() == Some(&':')
                    };
                    if inner {
                        chars.next();
                        chars.next();
                        word.push_str("::");
                    } else if is_word(c) {
                        word.push(c);
                        chars.next();
                    } else {
                        break;
                    }
                }
                found.push((Token::Word(word), line));
            }
            mark => found.push((Token::Mark(mark), line)),
        }
    }
    found
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%' | '.')
}
