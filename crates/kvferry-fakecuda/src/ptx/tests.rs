//! The interpreter against oracles that compute with Rust's own integers.

use std::fmt::Write;
use std::sync::Arc;

use super::run::{Bus, Trap, run_thread};
use super::{Launch, parse};
use crate::abi::Error;

/// Flat memory from address 0x1000 on.
struct Flat(Vec<u8>);

const BASE: u64 = 0x1000;

impl Flat {
    fn range(&self, address: u64, len: usize) -> Result<std::ops::Range<usize>, ()> {
        let start = address.checked_sub(BASE).ok_or(())? as usize;
        if start + len <= self.0.len() { Ok(start..start + len) } else { Err(()) }
    }
}

impl Bus for Flat {
    fn read(&mut self, address: u64, into: &mut [u8], _: bool) -> Result<(), ()> {
        let range = self.range(address, into.len())?;
        into.copy_from_slice(&self.0[range]);
        Ok(())
    }

    fn write(&mut self, address: u64, from: &[u8]) -> Result<(), ()> {
        let range = self.range(address, from.len())?;
        self.0[range].copy_from_slice(from);
        Ok(())
    }
}

fn module(params: &str, body: &str) -> String {
    format!(
        ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k(\n{params}\n)\n{{\n{body}\n}}\n"
    )
}

fn launch(text: &str, params: &[u8], grid: [u32; 3], block: [u32; 3]) -> Launch {
    let mut functions = parse(text, 87, 90).unwrap_or_else(|refusal| panic!("{refusal:?}\n{text}"));
    let function = Arc::new(functions.remove(0));
    assert_eq!(function.param_bytes as usize, params.len());
    Launch { function, params: params.to_vec(), grid, block }
}

fn run(text: &str, params: &[u8], grid: u32, block: u32, memory: &mut Flat) -> Result<(), Trap> {
    let launch = launch(text, params, [grid, 1, 1], [block, 1, 1]);
    for thread in 0..launch.threads() {
        let mut budget = 1_000_000;
        run_thread(&launch, thread, memory, &mut budget)?;
    }
    Ok(())
}

/// One operation on 32 or 64 bits: its name, and what it computes.
type Oracle = (&'static str, fn(u64, u64) -> u64);

const OPERATIONS: [Oracle; 34] = [
    ("add.u32", |a, b| u64::from((a as u32).wrapping_add(b as u32))),
    ("add.s64", |a, b| a.wrapping_add(b)),
    ("sub.s32", |a, b| u64::from((a as u32).wrapping_sub(b as u32))),
    ("sub.u64", |a, b| a.wrapping_sub(b)),
    ("mul.lo.s32", |a, b| u64::from((a as u32).wrapping_mul(b as u32))),
    ("mul.lo.u64", |a, b| a.wrapping_mul(b)),
    ("mul.hi.u32", |a, b| (u64::from(a as u32) * u64::from(b as u32)) >> 32),
    ("mul.hi.s32", |a, b| u64::from(((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32)),
    ("mul.hi.s64", |a, b| ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64),
    ("mul.hi.u64", |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64),
    ("div.u32", |a, b| u64::from((a as u32).checked_div(b as u32).unwrap_or(u32::MAX))),
    ("rem.u64", |a, b| a.checked_rem(b).unwrap_or(a)),
    ("and.b32", |a, b| u64::from(a as u32 & b as u32)),
    ("and.b64", |a, b| a & b),
    ("or.b32", |a, b| u64::from(a as u32 | b as u32)),
    ("or.b64", |a, b| a | b),
    ("xor.b64", |a, b| a ^ b),
    ("min.s32", |a, b| u64::from((a as i32).min(b as i32) as u32)),
    ("min.u32", |a, b| u64::from((a as u32).min(b as u32))),
    ("max.s64", |a, b| (a as i64).max(b as i64) as u64),
    ("max.u64", |a, b| a.max(b)),
    ("setp.lt.s32", |a, b| u64::from((a as i32) < b as i32)),
    ("setp.lt.u32", |a, b| u64::from((a as u32) < b as u32)),
    ("setp.ge.s64", |a, b| u64::from(a as i64 >= b as i64)),
    ("setp.gt.u64", |a, b| u64::from(a > b)),
    ("setp.le.u32", |a, b| u64::from(a as u32 <= b as u32)),
    ("setp.eq.u64", |a, b| u64::from(a == b)),
    ("setp.ne.s32", |a, b| u64::from(a as u32 != b as u32)),
    ("shl.b32", |a, b| u64::from((a as u32).checked_shl(b as u32).unwrap_or(0))),
    ("shl.b64", |a, b| a.checked_shl(b as u32).unwrap_or(0)),
    ("shr.u32", |a, b| u64::from((a as u32).checked_shr(b as u32).unwrap_or(0))),
    ("shr.s32", |a, b| u64::from(((a as i32) >> (b as u32).min(31)) as u32)),
    ("shr.u64", |a, b| a.checked_shr(b as u32).unwrap_or(0)),
    ("shr.s64", |a, b| ((a as i64) >> (b as u32).min(63)) as u64),
];

/// A number near the edges of the types.
fn edge(rng: &mut fastrand::Rng) -> u64 {
    let shift = rng.u32(..64);
    match rng.u8(..5) {
        0 => rng.u64(..70),
        1 => (1 << shift) - 1,
        2 => 1 << shift,
        3 => u64::MAX << shift,
        _ => rng.u64(..),
    }
}

#[test]
fn random_programs_compute_what_rusts_integers_compute() {
    let mut rng = fastrand::Rng::with_seed(3);
    for _ in 0..300 {
        // Eight values, each in a register of 64 bits and, cut, in one of 32.
        let mut values: [u64; 8] = std::array::from_fn(|_| edge(&mut rng));
        let mut body = String::from(".reg .b64 %d<8>;\n.reg .b32 %r<8>;\n.reg .pred %p<2>;\n");
        for (index, value) in values.iter().enumerate() {
            writeln!(body, "mov.u64 %d{index}, {value:#x};").expect("text");
            writeln!(body, "cvt.u32.u64 %r{index}, %d{index};").expect("text");
        }
        for _ in 0..60 {
            let (name, oracle) = OPERATIONS[rng.usize(..OPERATIONS.len())];
            let (into, a, b) = (rng.usize(..8), rng.usize(..8), rng.usize(..8));
            let wide = name.ends_with("64");
            let (x, y) = (if wide { "%d" } else { "%r" }, if wide { "%d" } else { "%r" });
            // The count of a shift is 32 bits wide; half of the counts are in reach.
            let shift = name.starts_with("sh");
            let second = if shift && rng.bool() { rng.u64(..70) } else { values[b] };
            let operand = if second == values[b] {
                format!("{}{b}", if shift { "%r" } else { y })
            } else {
                second.to_string()
            };
            values[into] = oracle(values[a], second);
            if name.starts_with("setp") {
                writeln!(body, "{name} %p0, {x}{a}, {operand};").expect("text");
                writeln!(body, "selp.b64 %d{into}, 1, 0, %p0;").expect("text");
                writeln!(body, "cvt.u32.u64 %r{into}, %d{into};").expect("text");
                continue;
            }
            writeln!(body, "{name} {x}{into}, {x}{a}, {operand};").expect("text");
            let copy = if wide { "cvt.u32.u64 %r" } else { "cvt.u64.u32 %d" };
            writeln!(body, "{copy}{into}, {x}{into};").expect("text");
        }
        body += ".reg .b64 %base;\nld.param.u64 %base, [out];\n";
        for index in 0..8 {
            writeln!(body, "st.global.u64 [%base+{}], %d{index};", index * 8).expect("text");
        }
        let mut memory = Flat(vec![0; 64]);
        let text = module(".param .u64 out", &body);
        run(&text, &BASE.to_le_bytes(), 1, 1, &mut memory).expect("no trap");
        let stored: Vec<u64> =
            memory.0.chunks(8).map(|b| u64::from_le_bytes(b.try_into().expect("8"))).collect();
        assert_eq!(stored, values, "{body}");
    }
}

#[test]
fn products_sums_and_conversions_of_both_signs() {
    let body = "
        .reg .b64 %d<9>; .reg .b32 %r<9>; .reg .b16 %h<3>; .reg .pred %p<3>;
        ld.param.u64 %d0, [out];
        mov.u32 %r0, -3;
        mov.s32 %r1, 5;
        mul.wide.s32 %d1, %r0, %r1;         st.global.u64 [%d0], %d1;
        mul.wide.u32 %d1, %r0, 2;           st.global.u64 [%d0+8], %d1;
        mad.lo.s32 %r2, %r0, %r1, 20;       st.global.u32 [%d0+16], %r2;
        mad.wide.u32 %d2, %r1, 16, %d0;     sub.u64 %d2, %d2, %d0; st.global.u64 [%d0+24], %d2;
        cvt.s64.s32 %d3, %r0;               st.global.u64 [%d0+32], %d3;
        cvt.u64.u32 %d3, %r0;               st.global.u64 [%d0+40], %d3;
        cvt.s32.s8 %r3, %r0;                st.global.u32 [%d0+48], %r3;
        cvt.u32.u8 %r3, %r0;                st.global.u32 [%d0+52], %r3;
        cvt.u16.u32 %h0, %r0;               st.global.u16 [%d0+56], %h0;
        st.global.u8 [%d0+58], %r0;
        mov.b64 %d4, {%r1, %r0};            st.global.b64 [%d0+64], %d4;
        mov.b64 {%r5, %r6}, %d4;            st.global.v2.u32 [%d0+72], {%r6, %r5};
        neg.s32 %r7, %r1;                   st.global.u32 [%d0+80], %r7;
        abs.s32 %r7, %r0;                   st.global.u32 [%d0+84], %r7;
        not.b32 %r7, %r1;                   st.global.u32 [%d0+88], %r7;
        setp.lt.s32 %p0|%p1, %r0, %r1;
        and.pred %p2, %p0, %p1;
        selp.u32 %r7, 1, 2, %p2;            st.global.u32 [%d0+92], %r7;
        not.pred %p2, %p2;
        @%p2 st.global.u32 [%d0+96], %r1;
        @!%p2 st.global.u32 [%d0+100], %r1;
        ld.global.s8 %r8, [%d0+58];         st.global.u32 [%d0+104], %r8;
        ret;";
    let mut memory = Flat(vec![0; 112]);
    run(&module(".param .u64 out", body), &BASE.to_le_bytes(), 1, 1, &mut memory).expect("no trap");
    let wide = |at: usize| u64::from_le_bytes(memory.0[at..at + 8].try_into().expect("8"));
    let word = |at: usize| u32::from_le_bytes(memory.0[at..at + 4].try_into().expect("4"));
    assert_eq!([wide(0), wide(8)], [(-15i64) as u64, (u64::from(u32::MAX) - 2) * 2]);
    assert_eq!([u64::from(word(16)), wide(24)], [5, 80]);
    assert_eq!([wide(32), wide(40)], [(-3i64) as u64, u64::from(u32::MAX) - 2]);
    assert_eq!([word(48), word(52), word(56)], [-3i32 as u32, 253, 0x00fd_fffd]);
    assert_eq!([wide(64), wide(72)], [0xffff_fffd_0000_0005, 0x0000_0005_ffff_fffd]);
    assert_eq!([word(80), word(84), word(88)], [-5i32 as u32, 3, !5]);
    assert_eq!([word(92), word(96), word(100), word(104)], [2, 5, 0, -3i32 as u32]);
}

#[test]
fn special_registers_tell_each_thread_its_place() {
    let body = "
        .reg .b64 %d<3>; .reg .b32 %r<9>;
        ld.param.u64 %d0, [out];
        mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %ctaid.x;
        mov.u32 %r3, %ntid.x; mov.u32 %r4, %ntid.y; mov.u32 %r5, %nctaid.x; mov.u32 %r6, %laneid;
        mad.lo.u32 %r7, %r2, %r4, %r1;
        mad.lo.u32 %r7, %r7, %r3, %r0;
        mul.wide.u32 %d1, %r7, 16;
        add.u64 %d1, %d1, %d0;
        st.global.v4.u32 [%d1], {%r0, %r2, %r5, %r6};";
    let text = module(".param .u64 out", body);
    let launch = launch(&text, &BASE.to_le_bytes(), [3, 1, 1], [8, 6, 1]);
    let mut memory = Flat(vec![0; 3 * 48 * 16]);
    for thread in (0..launch.threads()).rev() {
        run_thread(&launch, thread, &mut memory, &mut 1000).expect("no trap");
    }
    for (index, bytes) in memory.0.chunks(16).enumerate() {
        let word = |at: usize| u32::from_le_bytes(bytes[at * 4..at * 4 + 4].try_into().expect("4"));
        let within = index as u32 % 48;
        let found = [word(0), word(1), word(2), word(3)];
        assert_eq!(found, [within % 8, index as u32 / 48, 3, within % 32]);
    }
}

#[test]
fn parameters_are_aligned_by_their_types() {
    let params = ".param .u32 a, .param .u64 .ptr .global .align 16 b, .param .u8 c,
        .param .align 8 .b8 d[12]";
    let body = "
        .reg .b64 %d<4>; .reg .b32 %r<4>;
        ld.param.u64 %d0, [b]; ld.param.u32 %r0, [a]; ld.param.u8 %r1, [c]; ld.param.u32 %r2, [d+8];
        st.global.u32 [%d0], %r0; st.global.u32 [%d0+4], %r1; st.global.u32 [%d0+8], %r2;";
    let mut bytes = vec![0; 36];
    bytes[..4].copy_from_slice(&7_u32.to_le_bytes());
    bytes[8..16].copy_from_slice(&BASE.to_le_bytes());
    bytes[16] = 9;
    bytes[32..36].copy_from_slice(&11_u32.to_le_bytes());
    let mut memory = Flat(vec![0; 12]);
    run(&module(params, body), &bytes, 1, 1, &mut memory).expect("no trap");
    assert_eq!(memory.0, [7, 0, 0, 0, 9, 0, 0, 0, 11, 0, 0, 0]);
}

#[test]
fn bad_addresses_and_endless_loops_trap_with_their_line() {
    let access = |address: &str| {
        let body = format!(".reg .b64 %d<2>;\nmov.u64 %d0, {address};\nld.global.u64 %d1, [%d0];");
        run(&module("", &body), &[], 1, 1, &mut Flat(vec![0; 64]))
    };
    assert_eq!(access("0x1038"), Ok(()));
    let trap = |error, address| Err(Trap { error, line: 10, address });
    assert_eq!(access("0x1040"), trap(Error::ILLEGAL_ADDRESS, 0x1040));
    assert_eq!(access("0x1004"), trap(Error::MISALIGNED_ADDRESS, 0x1004));
    let endless = run(&module("", "$loop: bra.uni $loop;"), &[], 1, 1, &mut Flat(Vec::new()));
    assert_eq!(endless, Err(Trap { error: Error::LAUNCH_TIMEOUT, line: 8, address: 0 }));
}

#[test]
fn what_the_interpreter_does_not_know_is_refused_with_its_line() {
    let refused = |text: &str, error: Error, line: u32, part: &str| {
        let refusal = parse(text, 80, 90).expect_err(text);
        assert_eq!((refusal.error, refusal.line), (error, line), "{refusal:?}");
        assert!(refusal.text.contains(part), "{refusal:?}");
    };
    let body = |body: &str| module(".param .u64 p", &format!(".reg .b32 %r<4>;\n{body}"));
    let invalid = Error::INVALID_PTX;
    refused(&body("\nbar.sync 0;"), invalid, 10, "bar.sync");
    refused(&body("fma.rn.f32 %r0, %r1, %r2, %r3;"), invalid, 9, "fma");
    refused(&body("add.f32 %r0, %r1, %r2;"), invalid, 9, "add.f32");
    refused(&body("add.u64 %r0, %r1, %r2;"), invalid, 9, "width");
    refused(&body("add.u32 %r0, %r1, %r4;"), invalid, 9, "%r4");
    refused(&body("ld.shared.u32 %r0, [%r1];"), invalid, 9, "ld.shared");
    refused(&body("ld.param.u32 %r0, [q];"), invalid, 9, "q");
    refused(&body("ld.param.u32 %r0, [p+8];"), invalid, 9, "leaves");
    refused(&body("add.u32 %r0, %r1, %r2"), invalid, 10, "`;`");
    refused(&body("bra nowhere;"), invalid, 9, "nowhere");
    refused(&body("a: b: a: ret;"), invalid, 9, "twice");
    refused(&body(".shared .b8 buffer[16];"), invalid, 9, ".shared");
    refused(".version 8.1\n", Error::UNSUPPORTED_PTX_VERSION, 1, "8.1");
    refused(".version 7.0\n.target sm_100\n", Error::NO_BINARY_FOR_GPU, 2, "sm_100");
    refused("int main() {}", invalid, 1, ".version");
    let text = body("/* a comment\nof two lines */ // and one\nret;");
    assert!(parse(&text, 80, 90).is_ok());
}

#[test]
fn text_that_is_cut_or_garbled_is_refused_and_never_a_panic() {
    let body = "
        .reg .b64 %d<4>; .reg .b32 %r<4>; .reg .pred %p;
        ld.param.u64 %d0, [out];
        $top: setp.eq.u64 %p, %d0, 0; @%p bra $top;
        ld.global.nc.v2.u64 {%d1, %d2}, [%d0+16]; st.global.cg.v2.u64 [%d0], {%d1, %d2};
        ret;";
    let text = module(".param .u64 out", body);
    for end in 0..text.len() {
        // A cut text is a module only if what is left is one.
        let _ = parse(&text[..end], 87, 90);
    }
    let mut rng = fastrand::Rng::with_seed(8);
    for _ in 0..3000 {
        let mut bytes = text.clone().into_bytes();
        for _ in 0..rng.usize(1..6) {
            let at = rng.usize(..bytes.len());
            bytes[at] = b"{}[]();,.%@!<>:+-/*0189xrd \n\""[rng.usize(..29)];
        }
        let garbled = String::from_utf8(bytes).expect("ASCII");
        if let Ok(functions) = parse(&garbled, 87, 90) {
            for function in functions {
                let params = vec![0; function.param_bytes as usize];
                let (grid, block) = ([1; 3], [1; 3]);
                let launch = Launch { function: Arc::new(function), params, grid, block };
                let _ = run_thread(&launch, 0, &mut Flat(vec![0; 64]), &mut 1000);
            }
        }
    }
}
