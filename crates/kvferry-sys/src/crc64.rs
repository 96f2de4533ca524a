//! CRC-64/NVME of memory that may change at any time.
//!
//! No reference to such memory may exist, so a digest that takes slices needs a copy of it first, which costs as much
//! as the digest. With AVX-512 and VPCLMULQDQ the memory is read by volatile loads instead, 512 bytes at a time, each
//! folded into the remainder of those before: the method of Gopal et al., "Fast CRC Computation for Generic
//! Polynomials Using PCLMULQDQ Instruction" (Intel, 2009). Other processors take the copy.

use crate::span::HostSpan;
use crc_fast::{CrcAlgorithm, Digest};

impl HostSpan {
    /// The CRC of bytes that have the CRC `before` (0 for none), followed by those of the span. A byte that changes
    /// meanwhile has one of its values.
    pub fn crc64(&self, before: u64) -> u64 {
        sum(self, None, before, folding::folder())
    }

    /// Copies `from` to the start of the span, as [`HostSpan::copy_from_span`]; returns the CRC as
    /// [`HostSpan::crc64`] of the bytes that were copied. If the spans overlap, the copy has unspecified bytes.
    ///
    /// # Panics
    /// If the span is shorter.
    pub fn copy_from_span_with_crc64(&self, from: &Self, before: u64) -> u64 {
        assert!(from.len() <= self.len(), "the span is too short for the copy");
        sum(from, Some(&self.truncated(from.len())), before, folding::folder())
    }
}

fn sum(
    from: &HostSpan,
    to: Option<&HostSpan>,
    before: u64,
    folder: Option<folding::Folder>,
) -> u64 {
    let (mut from, mut to) = (*from, to.copied());
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, !before);
    let folded = from.len() / folding::STEP * folding::STEP;
    if let Some(folder) = folder
        && folded >= folding::LEN_MIN
    {
        let (first, rest) = from.split_at(folded);
        let split = to.map(|to| to.split_at(folded));
        let remainder = folder.fold(&first, split.as_ref().map(|(to, _)| to), !before);
        // What was folded has the remainder of all bytes before, and of the state.
        digest = Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, 0);
        digest.update(&remainder);
        (from, to) = (rest, split.map(|(_, rest)| rest));
    }
    from.for_each_copy(|bytes| {
        digest.update(bytes);
        if let Some(now) = to {
            let (part, rest) = now.split_at(bytes.len());
            part.copy_from(bytes);
            to = Some(rest);
        }
    });
    digest.finalize()
}

#[cfg(target_arch = "x86_64")]
mod folding {
    use crate::span::HostSpan;
    use std::arch::x86_64::{
        __m512i, _mm_set_epi64x, _mm512_clmulepi64_epi128, _mm512_loadu_si512,
        _mm512_setzero_si512, _mm512_storeu_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
        _mm512_zextsi128_si512,
    };

    /// Bytes of a register.
    pub(super) const STEP: usize = 64;
    /// Registers that are folded side by side, so that one multiplication does not wait for another.
    const LANES: usize = 8;
    pub(super) const LEN_MIN: usize = LANES * STEP;

    /// The polynomial, its coefficient of x^63 in the lowest bit.
    const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

    /// x^n modulo the polynomial, in the same order of bits.
    const fn x_to(n: usize) -> u64 {
        let mut remainder = 1 << 63;
        let mut at = 0;
        while at < n {
            remainder = (remainder >> 1) ^ (if remainder & 1 == 1 { POLYNOMIAL } else { 0 });
            at += 1;
        }
        remainder
    }

    /// Factors that move the halves of 16 bytes over `bytes` bytes. The low half has the higher powers. One less than
    /// the distance: in this order of bits a product is one place too low.
    const fn factors(bytes: usize) -> [u64; STEP / 8] {
        let (low, high) = (x_to(8 * bytes + 63), x_to(8 * bytes - 1));
        [low, high, low, high, low, high, low, high]
    }

    static OVER_ALL: [u64; STEP / 8] = factors(LEN_MIN);
    static OVER_ONE: [u64; STEP / 8] = factors(STEP);

    /// A proof that this processor has the instructions.
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Folder(());

    pub(super) fn folder() -> Option<Folder> {
        let is_there =
            is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq");
        is_there.then_some(Folder(()))
    }

    impl Folder {
        /// 64 bytes with the same remainder as the span's, whose length is a multiple of `STEP` and at least
        /// `LEN_MIN`, after the state of a digest. Copies the bytes to `to`, which has the same length.
        pub(super) fn fold(self, from: &HostSpan, to: Option<&HostSpan>, state: u64) -> [u8; STEP] {
            let len = from.len();
            assert!(len >= LEN_MIN && len.is_multiple_of(STEP), "not a length that is folded");
            assert!(to.is_none_or(|to| to.len() == len), "not the length of the copy");
            // SAFETY: a `Folder` exists only where the processor has the instructions. The spans' makers promised
            // that they are mapped, `to` writable; the lengths are as `fold` asks.
            unsafe {
                match to {
                    Some(to) => fold::<true>(from.as_ptr(), to.as_ptr(), len, state),
                    None => fold::<false>(from.as_ptr(), std::ptr::null_mut(), len, state),
                }
            }
        }
    }

    /// Vector that may lie at any address.
    #[derive(Clone, Copy)]
    #[repr(C, packed)]
    struct Unaligned(__m512i);

    /// # Safety
    /// `from`, and `to` if `COPY`, are mapped for `len` bytes: a multiple of `STEP`, at least `LEN_MIN`.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    unsafe fn fold<const COPY: bool>(
        from: *const u8,
        to: *mut u8,
        len: usize,
        state: u64,
    ) -> [u8; STEP] {
        let load = |at: usize| {
            // SAFETY: the caller promises that `at + STEP <= len` bytes are mapped. Volatile: others may write them.
            let bytes = unsafe { from.add(at).cast::<Unaligned>().read_volatile() };
            if COPY {
                // SAFETY: as above, and writable.
                unsafe { to.add(at).cast::<Unaligned>().write_volatile(bytes) };
            }
            bytes.0
        };
        let times = |factors: &[u64; STEP / 8]| {
            // SAFETY: 64 bytes.
            unsafe { _mm512_loadu_si512(factors.as_ptr().cast()) }
        };
        let mut lanes = [_mm512_setzero_si512(); LANES];
        for (lane, at) in lanes.iter_mut().zip((0..).step_by(STEP)) {
            *lane = load(at);
        }
        let state = _mm512_zextsi128_si512(_mm_set_epi64x(0, state.cast_signed()));
        lanes[0] = _mm512_xor_si512(lanes[0], state);
        let mut at = LEN_MIN;
        let over_all = times(&OVER_ALL);
        while at + LEN_MIN <= len {
            for (number, lane) in lanes.iter_mut().enumerate() {
                *lane = moved(*lane, over_all, load(at + number * STEP));
            }
            at += LEN_MIN;
        }
        let over_one = times(&OVER_ONE);
        let mut folded = lanes[0];
        for lane in &lanes[1..] {
            folded = moved(folded, over_one, *lane);
        }
        while at < len {
            folded = moved(folded, over_one, load(at));
            at += STEP;
        }
        let mut bytes = [0; STEP];
        // SAFETY: 64 bytes.
        unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), folded) };
        bytes
    }

    /// Returns `bytes` moved by the distance of `factors`, added to `there`.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn moved(bytes: __m512i, factors: __m512i, there: __m512i) -> __m512i {
        let low = _mm512_clmulepi64_epi128::<0x00>(bytes, factors);
        let high = _mm512_clmulepi64_epi128::<0x11>(bytes, factors);
        // The sum of all three.
        _mm512_ternarylogic_epi64::<0x96>(low, high, there)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod folding {
    use crate::span::HostSpan;

    pub(super) const STEP: usize = 64;
    pub(super) const LEN_MIN: usize = STEP;

    /// The type without values: other processors have no folder.
    #[derive(Clone, Copy, Debug)]
    pub(super) enum Folder {}

    pub(super) fn folder() -> Option<Folder> {
        None
    }

    impl Folder {
        pub(super) fn fold(self, _: &HostSpan, _: Option<&HostSpan>, _: u64) -> [u8; STEP] {
            match self {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        };
        std::iter::repeat_with(&mut next).take(len).collect()
    }

    fn span(bytes: &mut [u8]) -> HostSpan {
        // SAFETY: the caller keeps the bytes as long as the span, and touches them by it only.
        unsafe { HostSpan::new(bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Ways to compute the sum: without folding, and with it if the processor has the instructions.
    fn folders() -> Vec<Option<folding::Folder>> {
        let mut folders = vec![None];
        match folding::folder() {
            None => eprintln!("skipped: folding, this processor has no AVX-512 with VPCLMULQDQ"),
            folder => folders.push(folder),
        }
        folders
    }

    #[test]
    fn the_sum_is_the_one_of_the_library_at_each_length_and_place() {
        let mut all = bytes(5_000);
        let lengths = (0..1_200).chain([1_535, 1_536, 2_048, 4_095, 4_096, 4_900]);
        for len in lengths {
            let at = len % 67;
            let expected = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &all[at..at + len]);
            for folder in folders() {
                let found = sum(&span(&mut all[at..at + len]), None, 0, folder);
                assert_eq!(found, expected, "{len} bytes, {folder:?}");
            }
        }
    }

    #[test]
    fn a_sum_goes_on_behind_another_one() {
        let mut all = bytes(4_000);
        let expected = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &all);
        for split in [0, 1, 63, 64, 511, 512, 513, 2_000, 3_999, 4_000] {
            let (first, second) = all.split_at_mut(split);
            for folder in folders() {
                let before = sum(&span(first), None, 0, folder);
                assert_eq!(sum(&span(second), None, before, folder), expected, "at {split}");
            }
        }
        assert_eq!(span(&mut all).crc64(0), expected);
    }

    #[test]
    fn a_copy_has_the_bytes_and_their_sum_and_nothing_behind_it_changes() {
        let mut all = bytes(40_000);
        for len in [0, 1, 64, 511, 512, 600, 5_000, 33_000] {
            let expected = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &all[3..3 + len]);
            for folder in folders() {
                let mut copy = vec![0xaa; len + 16];
                let found =
                    sum(&span(&mut all[3..3 + len]), Some(&span(&mut copy[..len])), 0, folder);
                assert_eq!(found, expected, "{len} bytes, {folder:?}");
                assert_eq!(copy[..len], all[3..3 + len]);
                assert_eq!(copy[len..], [0xaa; 16]);
            }
        }
        let mut copy = vec![0; 40_001];
        let found = span(&mut copy).copy_from_span_with_crc64(&span(&mut all), 0);
        assert_eq!(found, crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &all));
        assert_eq!(copy[..40_000], all);
    }
}
