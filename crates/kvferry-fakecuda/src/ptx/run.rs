//! One thread of a kernel, from its first instruction to its end.

use super::Launch;
use super::code::{Address, Binary, Compare, Op, Special, Type, Unary, Value};
use crate::abi::Error;

/// The memory that a kernel reaches. A failed access is an address that is not mapped.
pub(crate) trait Bus {
    fn read(&mut self, address: u64, into: &mut [u8], read_only: bool) -> Result<(), ()>;
    fn write(&mut self, address: u64, from: &[u8]) -> Result<(), ()>;
}

/// Why a thread stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trap {
    pub(crate) error: Error,
    pub(crate) line: u32,
    /// The address at fault, 0 for other reasons.
    pub(crate) address: u64,
}

struct Thread<'a> {
    launch: &'a Launch,
    registers: Vec<u64>,
    block: [u32; 3],
    index: [u32; 3],
}

/// Runs thread number `thread` of the grid. `budget`: the instructions that it may still take.
pub(crate) fn run_thread(
    launch: &Launch,
    thread: u64,
    bus: &mut impl Bus,
    budget: &mut u64,
) -> Result<(), Trap> {
    let per_block: u64 = launch.block.iter().map(|&n| u64::from(n)).product();
    let mut state = Thread {
        launch,
        registers: vec![0; launch.function.registers],
        block: spread(thread / per_block, launch.grid),
        index: spread(thread % per_block, launch.block),
    };
    let code = &launch.function.code;
    let mut at = 0;
    while let Some(instruction) = code.get(at) {
        let trap = |error, address| Trap { error, line: instruction.line, address };
        *budget = budget.checked_sub(1).ok_or(trap(Error::LAUNCH_TIMEOUT, 0))?;
        at += 1;
        if let Some(guard) = instruction.guard
            && (state.registers[guard.register] != 0) == guard.negated
        {
            continue;
        }
        match &instruction.op {
            Op::Jump(target) => at = *target,
            Op::End => return Ok(()),
            op => state.step(op, bus).map_err(|(error, address)| trap(error, address))?,
        }
    }
    Ok(())
}

/// The three coordinates of a number.
fn spread(number: u64, extent: [u32; 3]) -> [u32; 3] {
    let (x, y) = (u64::from(extent[0]), u64::from(extent[1]));
    [(number % x) as u32, (number / x % y) as u32, (number / x / y) as u32]
}

impl Thread<'_> {
    fn value(&self, value: Value) -> u64 {
        match value {
            Value::Register(register) => self.registers[register],
            Value::Number(number) => number,
            Value::Special(special) => u64::from(self.special(special)),
        }
    }

    fn special(&self, special: Special) -> u32 {
        let size = self.launch.block;
        let flat = self.index[0] + size[0] * (self.index[1] + size[1] * self.index[2]);
        match special {
            Special::Tid(axis) => self.index[axis],
            Special::Ntid(axis) => size[axis],
            Special::Ctaid(axis) => self.block[axis],
            Special::Nctaid(axis) => self.launch.grid[axis],
            Special::Lane => flat % 32,
            Special::Warp => flat / 32,
            Special::WarpSize => 32,
        }
    }

    fn address(&self, address: Address, bytes: u32) -> Result<u64, (Error, u64)> {
        let at = self.value(address.base).wrapping_add(address.offset);
        if at.is_multiple_of(u64::from(bytes)) {
            Ok(at)
        } else {
            Err((Error::MISALIGNED_ADDRESS, at))
        }
    }

    fn step(&mut self, op: &Op, bus: &mut impl Bus) -> Result<(), (Error, u64)> {
        match *op {
            Op::LoadParam { ty, ref into, offset } => {
                let width = ty.bytes() as usize;
                for (index, &register) in into.iter().enumerate() {
                    let at = offset as usize + index * width;
                    let bytes = &self.launch.params[at..at + width];
                    self.registers[register] = ty.widen(number(bytes));
                }
            }
            Op::Load { ty, ref into, from, read_only } => {
                let width = ty.bytes() as usize;
                let mut bytes = [0; 16];
                let bytes = &mut bytes[..width * into.len()];
                let at = self.address(from, bytes.len() as u32)?;
                bus.read(at, bytes, read_only).map_err(|()| (Error::ILLEGAL_ADDRESS, at))?;
                for (part, &register) in bytes.chunks(width).zip(into) {
                    self.registers[register] = ty.widen(number(part));
                }
            }
            Op::Store { ty, ref from, into } => {
                let width = ty.bytes() as usize;
                let mut bytes = [0; 16];
                let bytes = &mut bytes[..width * from.len()];
                for (part, &value) in bytes.chunks_mut(width).zip(from) {
                    part.copy_from_slice(&self.value(value).to_le_bytes()[..width]);
                }
                let at = self.address(into, bytes.len() as u32)?;
                bus.write(at, bytes).map_err(|()| (Error::ILLEGAL_ADDRESS, at))?;
            }
            Op::Unary { what, ty, into, a } => {
                let a = self.value(a);
                self.registers[into] = ty.cut(unary(what, ty, a));
            }
            Op::Binary { what, ty, into, a, b } => {
                let (a, b) = (self.value(a), self.value(b));
                self.registers[into] = ty.cut(binary(what, ty, a, b));
            }
            Op::MulWide { ty, into, a, b } => {
                let product = ty.widen(self.value(a)).wrapping_mul(ty.widen(self.value(b)));
                self.registers[into] = wide(ty).cut(product);
            }
            Op::Mad { ty, into, a, b, c, high, wide: whole } => {
                let (a, b, c) = (self.value(a), self.value(b), self.value(c));
                let product = if whole {
                    ty.widen(a).wrapping_mul(ty.widen(b))
                } else {
                    binary(if high { Binary::MulHi } else { Binary::MulLo }, ty, a, b)
                };
                let result = if whole { wide(ty) } else { ty };
                self.registers[into] = result.cut(product.wrapping_add(c));
            }
            Op::Set { how, ty, into, negated, a, b } => {
                let holds = compare(how, ty, self.value(a), self.value(b));
                self.registers[into] = u64::from(holds);
                if let Some(negated) = negated {
                    self.registers[negated] = u64::from(!holds);
                }
            }
            Op::Select { ty, into, a, b, by } => {
                let chosen = if self.registers[by] != 0 { a } else { b };
                self.registers[into] = ty.cut(self.value(chosen));
            }
            Op::Convert { to, from, into, a } => {
                self.registers[into] = to.cut(from.widen(self.value(a)));
            }
            Op::Pack { ty, into, ref from } => {
                let parts = from.iter().rev().map(|&part| ty.cut(self.value(part)));
                self.registers[into] = parts.fold(0, |whole, part| whole << ty.bits | part);
            }
            Op::Unpack { ty, ref into, a } => {
                let whole = self.value(a);
                for (index, &register) in into.iter().enumerate() {
                    self.registers[register] = ty.cut(whole >> (ty.bits * index as u32));
                }
            }
            Op::Jump(_) | Op::End => {}
        }
        Ok(())
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |whole, &byte| whole << 8 | u64::from(byte))
}

fn wide(ty: Type) -> Type {
    Type { bits: ty.bits * 2, signed: ty.signed }
}

fn unary(what: Unary, ty: Type, a: u64) -> u64 {
    match what {
        Unary::Move => a,
        Unary::Not if ty.bits == 1 => u64::from(a == 0),
        Unary::Not => !a,
        Unary::Neg => a.wrapping_neg(),
        Unary::Abs => (ty.widen(a) as i64).unsigned_abs(),
    }
}

fn binary(what: Binary, ty: Type, a: u64, b: u64) -> u64 {
    let (wide_a, wide_b) = (ty.widen(a), ty.widen(b));
    match what {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::MulLo => a.wrapping_mul(b),
        Binary::MulHi if ty.signed => {
            ((i128::from(wide_a as i64) * i128::from(wide_b as i64)) >> ty.bits) as u64
        }
        Binary::MulHi => ((u128::from(wide_a) * u128::from(wide_b)) >> ty.bits) as u64,
        // Hardware gives all ones for a division by zero.
        Binary::Div if wide_b == 0 => u64::MAX,
        Binary::Rem if wide_b == 0 => wide_a,
        Binary::Div if ty.signed => (wide_a as i64).wrapping_div(wide_b as i64) as u64,
        Binary::Rem if ty.signed => (wide_a as i64).wrapping_rem(wide_b as i64) as u64,
        Binary::Div => wide_a / wide_b,
        Binary::Rem => wide_a % wide_b,
        Binary::And => a & b,
        Binary::Or => a | b,
        Binary::Xor => a ^ b,
        Binary::Min => {
            if ty.less(b, a) {
                b
            } else {
                a
            }
        }
        Binary::Max => {
            if ty.less(a, b) {
                b
            } else {
                a
            }
        }
        Binary::Shl => shift(ty, a, b, |a, n| a << n, 0),
        Binary::Shr if ty.signed => {
            let sign = if (wide_a as i64) < 0 { u64::MAX } else { 0 };
            shift(ty, wide_a, b, |a, n| ((a as i64) >> n) as u64, sign)
        }
        Binary::Shr => shift(ty, wide_a, b, |a, n| a >> n, 0),
    }
}

/// A shift whose count is 32 bits without a sign; counts beyond the width give `all`.
fn shift(ty: Type, a: u64, count: u64, by: fn(u64, u32) -> u64, all: u64) -> u64 {
    let count = count as u32;
    if count >= ty.bits { all } else { by(a, count) }
}

fn compare(how: Compare, ty: Type, a: u64, b: u64) -> bool {
    match how {
        Compare::Eq => ty.cut(a) == ty.cut(b),
        Compare::Ne => ty.cut(a) != ty.cut(b),
        Compare::Lt => ty.less(a, b),
        Compare::Le => !ty.less(b, a),
        Compare::Gt => ty.less(b, a),
        Compare::Ge => !ty.less(a, b),
    }
}
