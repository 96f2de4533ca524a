//! The form of a kernel that the interpreter runs.

/// The type of an instruction's operands: their width and whether they have a sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Type {
    /// Bits; 1 for predicates.
    pub(super) bits: u32,
    pub(super) signed: bool,
}

impl Type {
    /// A type by its name without the dot. Floating point counts as bits.
    pub(super) fn named(name: &str) -> Option<Self> {
        let ty = |bits, signed| Some(Self { bits, signed });
        match name {
            "pred" => ty(1, false),
            "b8" | "u8" => ty(8, false),
            "s8" => ty(8, true),
            "b16" | "u16" | "f16" => ty(16, false),
            "s16" => ty(16, true),
            "b32" | "u32" | "f32" => ty(32, false),
            "s32" => ty(32, true),
            "b64" | "u64" | "f64" => ty(64, false),
            "s64" => ty(64, true),
            _ => None,
        }
    }

    pub(super) fn bytes(self) -> u32 {
        self.bits.div_ceil(8)
    }

    /// The value's low bits, without a sign.
    pub(super) fn cut(self, value: u64) -> u64 {
        if self.bits == 64 { value } else { value & ((1 << self.bits) - 1) }
    }

    /// The value in 64 bits, its sign extended where the type has one.
    pub(super) fn widen(self, value: u64) -> u64 {
        let cut = self.cut(value);
        if self.signed && self.bits < 64 && cut >> (self.bits - 1) == 1 {
            cut | !0 << self.bits
        } else {
            cut
        }
    }

    pub(super) fn less(self, a: u64, b: u64) -> bool {
        let (a, b) = (self.widen(a), self.widen(b));
        if self.signed { (a as i64) < b as i64 } else { a < b }
    }
}

/// A special register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    Lane,
    Warp,
    WarpSize,
}

/// Operand of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Value {
    Register(usize),
    Number(u64),
    Special(Special),
}

/// An address in brackets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) base: Value,
    pub(super) offset: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    Add,
    Sub,
    MulLo,
    MulHi,
    Div,
    Rem,
    And,
    Or,
    Xor,
    Min,
    Max,
    Shl,
    Shr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unary {
    Move,
    Not,
    Neg,
    Abs,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Op {
    LoadParam {
        ty: Type,
        into: Vec<usize>,
        offset: u32,
    },
    /// `read_only`: by `.nc`, which promises that the kernel does not write the bytes.
    Load {
        ty: Type,
        into: Vec<usize>,
        from: Address,
        read_only: bool,
    },
    Store {
        ty: Type,
        from: Vec<Value>,
        into: Address,
    },
    Unary {
        what: Unary,
        ty: Type,
        into: usize,
        a: Value,
    },
    Binary {
        what: Binary,
        ty: Type,
        into: usize,
        a: Value,
        b: Value,
    },
    /// Operands of `ty`, a result twice as wide.
    MulWide {
        ty: Type,
        into: usize,
        a: Value,
        b: Value,
    },
    /// `a * b + c`; `high` takes the product's upper half, `wide` all of it.
    Mad {
        ty: Type,
        into: usize,
        a: Value,
        b: Value,
        c: Value,
        high: bool,
        wide: bool,
    },
    Set {
        how: Compare,
        ty: Type,
        into: usize,
        negated: Option<usize>,
        a: Value,
        b: Value,
    },
    Select {
        ty: Type,
        into: usize,
        a: Value,
        b: Value,
        by: usize,
    },
    Convert {
        to: Type,
        from: Type,
        into: usize,
        a: Value,
    },
    /// Registers of `ty` become one of twice or four times the width.
    Pack {
        ty: Type,
        into: usize,
        from: Vec<Value>,
    },
    Unpack {
        ty: Type,
        into: Vec<usize>,
        a: Value,
    },
    Jump(usize),
    End,
}

/// The predicate that an instruction needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Guard {
    pub(super) register: usize,
    pub(super) negated: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) guard: Option<Guard>,
    pub(super) op: Op,
    pub(super) line: u32,
}

/// A parameter's place in the parameter bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Param {
    pub(super) name: String,
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

/// One kernel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    /// The length of all parameter bytes.
    pub(crate) param_bytes: u32,
    pub(super) registers: usize,
    pub(super) code: Vec<Instruction>,
}
