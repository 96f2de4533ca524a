//! The instructions of a body.

use super::{Parsed, Parser};
use crate::ptx::code::{
    Address, Binary, Compare, Guard, Instruction, Op, Special, Type, Unary, Value,
};
use crate::ptx::lexer::Token;

/// An instruction's name, cut at its dots.
struct Name {
    whole: String,
    parts: Vec<String>,
    line: u32,
}

impl Name {
    fn has(&self, part: &str) -> bool {
        self.parts.iter().any(|own| own == part)
    }

    /// Whether all parts after the first are among `known` or types.
    fn only(&self, known: &[&str]) -> bool {
        let known = |part: &String| known.contains(&part.as_str()) || Type::named(part).is_some();
        self.parts.iter().skip(1).all(known)
    }
}

impl Parser {
    /// An instruction that will stand at `place`.
    pub(super) fn instruction(&mut self, place: usize) -> Parsed<Instruction> {
        let line = self.line();
        let guard = self.guard()?;
        let whole = self.word()?;
        let parts = whole.split('.').map(str::to_owned).collect();
        let name = Name { whole, parts, line };
        let op = self.operation(&name, place)?;
        self.expect(';')?;
        Ok(Instruction { guard, op, line })
    }

    fn guard(&mut self) -> Parsed<Option<Guard>> {
        if !self.take('@') {
            return Ok(None);
        }
        let negated = self.take('!');
        let register = self.destination(Some(Type { bits: 1, signed: false }))?;
        Ok(Some(Guard { register, negated }))
    }

    fn unknown<T>(&self, name: &Name) -> Parsed<T> {
        self.refuse_at(name.line, format!("`{}` is not supported", name.whole))
    }

    /// The types in the name, in their order.
    fn types(&self, name: &Name) -> Vec<Type> {
        name.parts.iter().skip(1).filter_map(|part| Type::named(part)).collect()
    }

    /// The one type in the name.
    fn one_type(&self, name: &Name, modifiers: &[&str]) -> Parsed<Type> {
        match self.types(name)[..] {
            [ty] if name.only(modifiers) => Ok(ty),
            _ => self.unknown(name),
        }
    }

    fn operation(&mut self, name: &Name, place: usize) -> Parsed<Op> {
        match name.parts[0].as_str() {
            "ld" => self.load(name),
            "st" => self.store(name),
            "mov" => self.moved(name),
            "not" | "neg" | "abs" => {
                let what = match name.parts[0].as_str() {
                    "not" => Unary::Not,
                    "neg" => Unary::Neg,
                    _ => Unary::Abs,
                };
                let ty = self.one_type(name, &[])?;
                let into = self.first(ty)?;
                Ok(Op::Unary { what, ty, into, a: self.value(ty)? })
            }
            "mul" | "mad" => self.product(name),
            "setp" => self.set(name),
            "selp" => {
                let ty = self.one_type(name, &[])?;
                let into = self.first(ty)?;
                let (a, b) = self.pair(ty)?;
                self.expect(',')?;
                let by = self.destination(Some(Type { bits: 1, signed: false }))?;
                Ok(Op::Select { ty, into, a, b, by })
            }
            "cvt" => self.convert(name),
            "cvta" => {
                // Generic and global addresses are the same numbers here.
                let ty = self.one_type(name, &["to", "global"])?;
                let into = self.first(ty)?;
                Ok(Op::Unary { what: Unary::Move, ty, into, a: self.value(ty)? })
            }
            "bra" => {
                if !name.only(&["uni"]) {
                    return self.unknown(name);
                }
                let label = self.word()?;
                self.jumps.push((place, label));
                Ok(Op::End)
            }
            "ret" | "exit" if name.only(&["uni"]) => Ok(Op::End),
            _ => self.binary(name),
        }
    }

    fn binary(&mut self, name: &Name) -> Parsed<Op> {
        let what = match name.parts[0].as_str() {
            "add" => Binary::Add,
            "sub" => Binary::Sub,
            "div" => Binary::Div,
            "rem" => Binary::Rem,
            "and" => Binary::And,
            "or" => Binary::Or,
            "xor" => Binary::Xor,
            "min" => Binary::Min,
            "max" => Binary::Max,
            "shl" => Binary::Shl,
            "shr" => Binary::Shr,
            _ => return self.unknown(name),
        };
        if name.parts.iter().any(|part| part.starts_with('f')) {
            return self.unknown(name);
        }
        let ty = self.one_type(name, &[])?;
        let into = self.first(ty)?;
        let a = self.value(ty)?;
        self.expect(',')?;
        let shifts = matches!(what, Binary::Shl | Binary::Shr);
        let b = self.value(if shifts { Type { bits: 32, signed: false } } else { ty })?;
        Ok(Op::Binary { what, ty, into, a, b })
    }

    fn product(&mut self, name: &Name) -> Parsed<Op> {
        let ty = self.one_type(name, &["lo", "hi", "wide"])?;
        let (wide, high) = (name.has("wide"), name.has("hi"));
        if !(wide || high || name.has("lo")) || wide && ty.bits == 64 {
            return self.unknown(name);
        }
        let result = if wide { Type { bits: ty.bits * 2, signed: ty.signed } } else { ty };
        let into = self.first(result)?;
        let (a, b) = self.pair(ty)?;
        if name.parts[0] == "mad" {
            self.expect(',')?;
            let c = self.value(result)?;
            return Ok(Op::Mad { ty, into, a, b, c, high, wide });
        }
        Ok(match (wide, high) {
            (true, _) => Op::MulWide { ty, into, a, b },
            (_, true) => Op::Binary { what: Binary::MulHi, ty, into, a, b },
            _ => Op::Binary { what: Binary::MulLo, ty, into, a, b },
        })
    }

    fn set(&mut self, name: &Name) -> Parsed<Op> {
        let Some((how, ty)) = name.parts.get(1).zip(self.types(name).first().copied()) else {
            return self.unknown(name);
        };
        let (how, unsigned) = match how.as_str() {
            "eq" => (Compare::Eq, false),
            "ne" => (Compare::Ne, false),
            "lt" => (Compare::Lt, false),
            "le" => (Compare::Le, false),
            "gt" => (Compare::Gt, false),
            "ge" => (Compare::Ge, false),
            "lo" => (Compare::Lt, true),
            "ls" => (Compare::Le, true),
            "hi" => (Compare::Gt, true),
            "hs" => (Compare::Ge, true),
            _ => return self.unknown(name),
        };
        if name.parts.len() != 3 || name.parts[2].starts_with('f') || unsigned && ty.signed {
            return self.unknown(name);
        }
        let bit = Some(Type { bits: 1, signed: false });
        let into = self.destination(bit)?;
        let negated = if self.take('|') { Some(self.destination(bit)?) } else { None };
        self.expect(',')?;
        let (a, b) = self.pair(ty)?;
        Ok(Op::Set { how, ty, into, negated, a, b })
    }

    fn convert(&mut self, name: &Name) -> Parsed<Op> {
        let [to, from] = self.types(name)[..] else { return self.unknown(name) };
        if name.parts.len() != 3 || name.parts[1..].iter().any(|part| part.starts_with('f')) {
            return self.unknown(name);
        }
        let line = self.line();
        let into = self.word()?;
        let into = match self.register(&into) {
            Some((register, ty)) if ty.bits >= to.bits => register,
            _ => return self.refuse_at(line, format!("{into} cannot hold the result")),
        };
        self.expect(',')?;
        let a = self.wider_value(from)?;
        Ok(Op::Convert { to, from, into, a })
    }

    fn moved(&mut self, name: &Name) -> Parsed<Op> {
        let ty = self.one_type(name, &[])?;
        if self.next_is('{') {
            let (into, part) = self.destinations()?;
            self.check_parts(name, ty, part, into.len())?;
            self.expect(',')?;
            return Ok(Op::Unpack { ty: part, into, a: self.value(ty)? });
        }
        let into = self.first(ty)?;
        if self.next_is('{') {
            let (from, part) = self.destinations()?;
            self.check_parts(name, ty, part, from.len())?;
            let from = from.into_iter().map(Value::Register).collect();
            return Ok(Op::Pack { ty: part, into, from });
        }
        Ok(Op::Unary { what: Unary::Move, ty, into, a: self.value(ty)? })
    }

    fn check_parts(&self, name: &Name, whole: Type, part: Type, count: usize) -> Parsed<()> {
        let fits = count > 1 && part.bits * count as u32 == whole.bits;
        if fits { Ok(()) } else { self.unknown(name) }
    }

    /// The words that loads and stores may have and that change nothing here.
    const HINTS: [&'static str; 14] = [
        "global",
        "nc",
        "cg",
        "ca",
        "cs",
        "cv",
        "lu",
        "wb",
        "wt",
        "volatile",
        "v2",
        "v4",
        "L1::no_allocate",
        "weak",
    ];

    /// The type and the number of elements of a load or store.
    fn access(&self, name: &Name) -> Parsed<(Type, usize)> {
        let prefetch = |part: &String| part.starts_with("L2::") || part.starts_with("L1::");
        let hints: Vec<&str> = Self::HINTS.to_vec();
        let known = name.parts.iter().skip(1).all(|part| {
            hints.contains(&part.as_str()) || prefetch(part) || Type::named(part).is_some()
        });
        let [ty] = self.types(name)[..] else { return self.unknown(name) };
        if !known || ty.bits == 1 {
            return self.unknown(name);
        }
        let count = match (name.has("v2"), name.has("v4")) {
            (true, false) => 2,
            (false, true) => 4,
            _ => 1,
        };
        if ty.bytes() as usize * count > 16 { self.unknown(name) } else { Ok((ty, count)) }
    }

    fn load(&mut self, name: &Name) -> Parsed<Op> {
        if name.parts.get(1).is_some_and(|part| part == "param") {
            return self.load_param(name);
        }
        let (ty, count) = self.access(name)?;
        let into = self.elements(name, ty, count)?;
        self.expect(',')?;
        let from = self.address()?;
        Ok(Op::Load { ty, into, from, read_only: name.has("nc") })
    }

    fn load_param(&mut self, name: &Name) -> Parsed<Op> {
        let count = match (name.has("v2"), name.has("v4")) {
            (true, false) => 2,
            (false, true) => 4,
            _ => 1,
        };
        let ty = self.one_type(name, &["param", "v2", "v4"])?;
        let into = self.elements(name, ty, count)?;
        self.expect(',')?;
        self.expect('[')?;
        let line = self.line();
        let param = self.word()?;
        let inner = if self.take('+') { self.number()? } else { 0 };
        self.expect(']')?;
        let found = self.params.iter().find(|known| known.name == param);
        let Some(found) = found else {
            return self.refuse_at(line, format!("no parameter is named {param}"));
        };
        let end = inner.saturating_add(u64::from(ty.bytes()) * count as u64);
        if end > u64::from(found.len) {
            return self.refuse_at(line, format!("the load leaves {param}"));
        }
        Ok(Op::LoadParam { ty, into, offset: found.offset + inner as u32 })
    }

    /// The registers of a load, which may be wider than its type.
    fn elements(&mut self, name: &Name, ty: Type, count: usize) -> Parsed<Vec<usize>> {
        let line = self.line();
        let names = self.names()?;
        if names.len() != count {
            return self.unknown(name);
        }
        let mut registers = Vec::new();
        for word in names {
            match self.register(&word) {
                Some((register, own)) if own.bits >= ty.bits => registers.push(register),
                _ => return self.refuse_at(line, format!("{word} cannot hold the value")),
            }
        }
        Ok(registers)
    }

    /// One word, or several in braces.
    fn names(&mut self) -> Parsed<Vec<String>> {
        if !self.take('{') {
            return Ok(vec![self.word()?]);
        }
        let mut names = vec![self.word()?];
        while self.take(',') {
            names.push(self.word()?);
        }
        self.expect('}')?;
        Ok(names)
    }

    fn store(&mut self, name: &Name) -> Parsed<Op> {
        let (ty, count) = self.access(name)?;
        if name.has("nc") {
            return self.unknown(name);
        }
        let into = self.address()?;
        self.expect(',')?;
        let from = if self.next_is('{') {
            let registers = self.elements(name, ty, count)?;
            registers.into_iter().map(Value::Register).collect()
        } else {
            vec![self.wider_value(ty)?]
        };
        if from.len() != count {
            return self.unknown(name);
        }
        Ok(Op::Store { ty, from, into })
    }

    fn address(&mut self) -> Parsed<Address> {
        self.expect('[')?;
        let base = self.value(Type { bits: 64, signed: false })?;
        let offset = match self.peek() {
            Some(token) if token.is('+') => {
                self.at += 1;
                self.number()?
            }
            Some(token) if token.is('-') => self.number()?,
            _ => 0,
        };
        self.expect(']')?;
        Ok(Address { base, offset })
    }

    /// A destination register and the comma after it.
    fn first(&mut self, ty: Type) -> Parsed<usize> {
        let register = self.destination(Some(ty))?;
        self.expect(',')?;
        Ok(register)
    }

    /// A register, of a type's width where one is given.
    fn destination(&mut self, ty: Option<Type>) -> Parsed<usize> {
        let line = self.line();
        let word = self.word()?;
        match self.register(&word) {
            Some((register, own)) if ty.is_none_or(|ty| ty.bits == own.bits) => Ok(register),
            Some(_) => self.refuse_at(line, format!("{word} has another width")),
            None => self.refuse_at(line, format!("no register is named {word}")),
        }
    }

    /// Registers in braces, all of one width.
    fn destinations(&mut self) -> Parsed<(Vec<usize>, Type)> {
        let line = self.line();
        let mut registers = Vec::new();
        let mut part = None;
        for word in self.names()? {
            match self.register(&word) {
                Some((register, ty)) if part.is_none_or(|part: Type| part.bits == ty.bits) => {
                    part = Some(ty);
                    registers.push(register);
                }
                _ => return self.refuse_at(line, format!("{word} does not fit the others")),
            }
        }
        match part {
            Some(part) => Ok((registers, part)),
            None => self.refuse_at(line, "no register in the braces"),
        }
    }

    fn pair(&mut self, ty: Type) -> Parsed<(Value, Value)> {
        let a = self.value(ty)?;
        self.expect(',')?;
        Ok((a, self.value(ty)?))
    }

    /// A register of exactly the type's width, a number, or a special register.
    fn value(&mut self, ty: Type) -> Parsed<Value> {
        self.value_with(|own| own.bits == ty.bits)
    }

    /// A register of the type's width or more, a number, or a special register.
    fn wider_value(&mut self, ty: Type) -> Parsed<Value> {
        self.value_with(|own| own.bits >= ty.bits)
    }

    fn value_with(&mut self, fits: impl Fn(Type) -> bool) -> Parsed<Value> {
        let line = self.line();
        let is_number = match self.peek() {
            Some(Token::Mark('-')) => true,
            Some(Token::Word(word)) => word.starts_with(|c: char| c.is_ascii_digit()),
            _ => false,
        };
        if is_number {
            return Ok(Value::Number(self.number()?));
        }
        let word = self.word()?;
        match (self.register(&word), special(&word)) {
            (Some((register, ty)), _) if fits(ty) => Ok(Value::Register(register)),
            (Some(_), _) => self.refuse_at(line, format!("{word} has another width")),
            (None, Some(special)) => Ok(Value::Special(special)),
            (None, None) => self.refuse_at(line, format!("no register is named {word}")),
        }
    }
}

fn special(word: &str) -> Option<Special> {
    let axis = || match word.rsplit_once('.') {
        Some((_, "x")) => Some(0),
        Some((_, "y")) => Some(1),
        Some((_, "z")) => Some(2),
        _ => None,
    };
    match word.split('.').next()? {
        "%tid" => axis().map(Special::Tid),
        "%ntid" => axis().map(Special::Ntid),
        "%ctaid" => axis().map(Special::Ctaid),
        "%nctaid" => axis().map(Special::Nctaid),
        "%laneid" => Some(Special::Lane),
        "%warpid" => Some(Special::Warp),
        "WARP_SZ" => Some(Special::WarpSize),
        _ => None,
    }
}
