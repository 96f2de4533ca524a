//! PTX text to kernels: the module's directives, and the declarations and labels of a body.

use std::collections::HashMap;

use super::code::{Function, Instruction, Op, Param, Type};
use super::lexer::{Token, tokens};
use crate::abi::Error;

mod instructions;

/// Why text is no module of this driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) error: Error,
    pub(crate) line: u32,
    pub(crate) text: String,
}

/// The most bytes of a kernel's parameters.
const PARAM_BYTES: u64 = 4096;

type Parsed<T> = Result<T, Refusal>;

/// The tokens that are left, and what the body has declared.
struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    /// Registers by name, with their place and type.
    registers: HashMap<String, (usize, Type)>,
    /// Registers declared as `name<count>`: the prefix, the first place, the count and the type.
    ranges: Vec<(String, usize, usize, Type)>,
    register_count: usize,
    params: Vec<Param>,
    /// Labels, with the index of the instruction that they stand before.
    labels: HashMap<String, usize>,
    /// Jumps by the index of their instruction, with the label that they name.
    jumps: Vec<(usize, String)>,
}

/// Parses a module. `version`: the newest PTX version accepted, as major * 10 + minor;
/// `architecture`: the device's, as major * 10 + minor.
pub(crate) fn parse(text: &str, version: u32, architecture: u32) -> Parsed<Vec<Function>> {
    let mut parser = Parser {
        tokens: tokens(text),
        at: 0,
        registers: HashMap::new(),
        ranges: Vec::new(),
        register_count: 0,
        params: Vec::new(),
        labels: HashMap::new(),
        jumps: Vec::new(),
    };
    let mut functions = Vec::new();
    parser.head(version, architecture)?;
    while parser.at < parser.tokens.len() {
        if parser.directive()? {
            functions.push(parser.entry()?);
        }
    }
    Ok(functions)
}

impl Parser {
    fn line(&self) -> u32 {
        let at = self.at.min(self.tokens.len().saturating_sub(1));
        self.tokens.get(at).map_or(1, |(_, line)| *line)
    }

    fn refuse<T>(&self, text: impl Into<String>) -> Parsed<T> {
        self.refuse_at(self.line(), text)
    }

    fn refuse_at<T>(&self, line: u32, text: impl Into<String>) -> Parsed<T> {
        Err(Refusal { error: Error::INVALID_PTX, line, text: text.into() })
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    fn next_is(&self, mark: char) -> bool {
        self.peek().is_some_and(|token| token.is(mark))
    }

    fn take(&mut self, mark: char) -> bool {
        let taken = self.next_is(mark);
        self.at += usize::from(taken);
        taken
    }

    fn expect(&mut self, mark: char) -> Parsed<()> {
        if self.take(mark) { Ok(()) } else { self.refuse(format!("expected `{mark}`")) }
    }

    fn word(&mut self) -> Parsed<String> {
        match self.peek() {
            Some(Token::Word(word)) => {
                let word = word.clone();
                self.at += 1;
                Ok(word)
            }
            _ => self.refuse("expected a word"),
        }
    }

    fn number(&mut self) -> Parsed<u64> {
        let negative = self.take('-');
        let line = self.line();
        let word = self.word()?;
        match literal(&word) {
            Some(number) if negative => Ok(number.wrapping_neg()),
            Some(number) => Ok(number),
            None => self.refuse_at(line, format!("`{word}` is no integer")),
        }
    }

    /// `.version`, `.target` and `.address_size`, in this order.
    fn head(&mut self, newest: u32, architecture: u32) -> Parsed<()> {
        if self.word()? != ".version" {
            return self.refuse("a module begins with .version");
        }
        let line = self.line();
        let version = self.word()?;
        let parts = version.split_once('.');
        let number = parts.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let Some((major, minor)): Option<(u32, u32)> = number else {
            return self.refuse_at(line, format!("`{version}` is no version"));
        };
        if major * 10 + minor > newest {
            let text = format!("PTX {version} is newer than the driver");
            return Err(Refusal { error: Error::UNSUPPORTED_PTX_VERSION, line, text });
        }
        if self.word()? != ".target" {
            return self.refuse("expected .target");
        }
        let line = self.line();
        let target = self.word()?;
        let digits = target.strip_prefix("sm_").map(|rest| rest.trim_end_matches(['a', 'f']));
        match digits.and_then(|digits| digits.parse::<u32>().ok()) {
            None => return self.refuse_at(line, format!("`{target}` is no target")),
            Some(number) if number > architecture => {
                let text = format!("the device is older than {target}");
                return Err(Refusal { error: Error::NO_BINARY_FOR_GPU, line, text });
            }
            Some(_) => {}
        }
        if self.word()? != ".address_size" || self.number()? != 64 {
            return self.refuse("expected .address_size 64");
        }
        Ok(())
    }

    /// One directive outside of a kernel; true when a kernel follows.
    fn directive(&mut self) -> Parsed<bool> {
        let line = self.line();
        let word = self.word()?;
        match word.as_str() {
            ".visible" | ".weak" => Ok(false),
            ".entry" => Ok(true),
            _ => self.refuse_at(line, format!("`{word}` is not supported")),
        }
    }

    /// A kernel from its name to the end of its body.
    fn entry(&mut self) -> Parsed<Function> {
        self.registers.clear();
        self.ranges.clear();
        self.labels.clear();
        self.jumps.clear();
        self.params.clear();
        self.register_count = 0;
        let name = self.word()?;
        let mut param_bytes = 0;
        if self.take('(') {
            while !self.take(')') {
                self.param(&mut param_bytes)?;
                if !self.next_is(')') {
                    self.expect(',')?;
                }
            }
        }
        // Hints of performance, such as `.maxntid 128, 1, 1`.
        while !self.next_is('{') {
            let line = self.line();
            match self.peek() {
                Some(Token::Word(word)) if word.starts_with(".m") || word.starts_with(".req") => {
                    self.at += 1;
                    self.number()?;
                    while self.take(',') {
                        self.number()?;
                    }
                }
                _ => return self.refuse_at(line, "expected the body of the kernel"),
            }
        }
        let code = self.body()?;
        Ok(Function {
            name,
            params: std::mem::take(&mut self.params),
            param_bytes,
            registers: self.register_count,
            code,
        })
    }

    /// One `.param`, whose place is the next multiple of its alignment.
    fn param(&mut self, end: &mut u32) -> Parsed<()> {
        if self.word()? != ".param" {
            return self.refuse("expected .param");
        }
        let mut ty = None;
        let mut align = None;
        let name = loop {
            let line = self.line();
            let word = self.word()?;
            let Some(rest) = word.strip_prefix('.') else { break word };
            match rest {
                "align" => align = Some(self.number()?),
                "ptr" | "global" => {}
                _ => match Type::named(rest) {
                    Some(named) => ty = Some(named),
                    None => return self.refuse_at(line, format!("`{word}` is not supported")),
                },
            }
        };
        let Some(ty) = ty else { return self.refuse("a parameter has no type") };
        let mut len = u64::from(ty.bytes());
        if self.take('[') {
            len = len.saturating_mul(self.number()?);
            self.expect(']')?;
        } else {
            // `.ptr .align n` tells of what the pointer points to.
            align = None;
        }
        let align = align.unwrap_or(u64::from(ty.bytes()));
        if !align.is_power_of_two() || align > 128 || len > PARAM_BYTES {
            return self.refuse("a parameter is too large");
        }
        let offset = end.next_multiple_of(align as u32);
        *end = offset + len as u32;
        if u64::from(*end) > PARAM_BYTES {
            return self.refuse("the parameters are too large");
        }
        self.params.push(Param { name, offset, len: len as u32 });
        Ok(())
    }

    fn body(&mut self) -> Parsed<Vec<Instruction>> {
        self.expect('{')?;
        let mut depth = 1;
        let mut code = Vec::new();
        while depth > 0 {
            if self.take('{') {
                depth += 1;
            } else if self.take('}') {
                depth -= 1;
            } else {
                self.statement(&mut code)?;
            }
        }
        for (place, label) in std::mem::take(&mut self.jumps) {
            let Some(&target) = self.labels.get(&label) else {
                return self.refuse_at(code[place].line, format!("no label is named {label}"));
            };
            code[place].op = Op::Jump(target);
        }
        Ok(code)
    }

    fn statement(&mut self, code: &mut Vec<Instruction>) -> Parsed<()> {
        let line = self.line();
        if let (Some(Token::Word(word)), Some((Token::Mark(':'), _))) =
            (self.peek().cloned(), self.tokens.get(self.at + 1))
        {
            self.at += 2;
            if self.labels.insert(word.clone(), code.len()).is_some() {
                return self.refuse_at(line, format!("the label {word} stands twice"));
            }
            return Ok(());
        }
        match self.peek() {
            Some(Token::Word(word)) if word == ".reg" => {
                self.at += 1;
                self.registers_of()
            }
            Some(Token::Word(word)) if word == ".pragma" => {
                self.at += 1;
                self.word()?;
                self.expect(';')
            }
            Some(Token::Word(word)) if word.starts_with('.') => {
                let text = format!("`{word}` is not supported");
                self.refuse_at(line, text)
            }
            None => self.refuse("the body has no end"),
            Some(_) => {
                let instruction = self.instruction(code.len())?;
                code.push(instruction);
                Ok(())
            }
        }
    }

    /// The rest of a `.reg` declaration.
    fn registers_of(&mut self) -> Parsed<()> {
        let line = self.line();
        let word = self.word()?;
        let Some(ty) = word.strip_prefix('.').and_then(Type::named) else {
            return self.refuse_at(line, format!("`{word}` is no type of registers"));
        };
        loop {
            let name = self.word()?;
            let first = self.register_count;
            if self.take('<') {
                let count = self.number()? as usize;
                self.expect('>')?;
                if count > 1 << 16 {
                    return self.refuse_at(line, "too many registers");
                }
                self.ranges.push((name, first, count, ty));
                self.register_count += count;
            } else {
                self.registers.insert(name, (first, ty));
                self.register_count += 1;
            }
            if self.take(';') {
                return Ok(());
            }
            self.expect(',')?;
        }
    }

    fn register(&self, name: &str) -> Option<(usize, Type)> {
        if let Some(&known) = self.registers.get(name) {
            return Some(known);
        }
        self.ranges.iter().rev().find_map(|(prefix, first, count, ty)| {
            let number: usize = name.strip_prefix(prefix.as_str())?.parse().ok()?;
            (number < *count).then_some((first + number, *ty))
        })
    }
}

/// An integer as C writes it, with or without a trailing U.
fn literal(word: &str) -> Option<u64> {
    let word = word.strip_suffix('U').unwrap_or(word);
    if let Some(hex) = word.strip_prefix("0x").or(word.strip_prefix("0X")) {
        u64::from_str_radix(hex, 16).ok()
    } else if let Some(binary) = word.strip_prefix("0b") {
        u64::from_str_radix(binary, 2).ok()
    } else if word.len() > 1 && word.starts_with('0') {
        u64::from_str_radix(&word[1..], 8).ok()
    } else {
        word.parse().ok()
    }
}
