//! Data frames.

use kvferry_proto::code::WireCode;
use kvferry_proto::frame::{head_crc, trailer_len, verify_head};
use kvferry_proto::fuzzing::{KeyedHeads, Script};
use kvferry_proto::{
    CHECKSUM_PIECE, Flags, FrameError, Limits, Notification, Op, PieceDigest, RegionId,
    RequestHeader, ResponseHeader, TransferId, WireDescriptor, crc32c, crc32c_append,
};

/// Limits of all sorts: what agents use, and some that short inputs reach.
const LIMITS: [Limits; 3] = [
    Limits { descriptors_max: 1 << 16, notify_max: 64 * 1024, payload_max: 1 << 40 },
    Limits { descriptors_max: 4, notify_max: 16, payload_max: 64 },
    Limits { descriptors_max: u32::MAX, notify_max: u32::MAX, payload_max: u64::MAX },
];

/// A stream of requests, as it crosses the wire, behind one byte of options.
///
/// A fuzzer does not guess checksums and tags: an odd byte says that they are to be put right first. The highest
/// bit says that the heads have keyed tags: they are of version 2.
pub fn request(bytes: &[u8]) {
    let mut keyed = KeyedHeads::default();
    stream(bytes, one_request, |stream, limits, seal| {
        one_keyed_request(stream, limits, seal, &mut keyed)
    });
}

/// The bit of the options that says that heads have keyed tags.
const KEYED: u8 = 0x80;

/// Reads one header after the other with what follows it, given as `one(bytes, limits, seal)`, or `keyed`.
fn stream(
    bytes: &[u8],
    mut one: impl FnMut(&mut [u8], &Limits, bool) -> Option<usize>,
    mut keyed: impl FnMut(&mut [u8], &Limits, bool) -> Option<usize>,
) {
    let mut script = Script::new(bytes);
    let options = script.byte();
    let limits = LIMITS[usize::from((options & !KEYED) >> 1) % LIMITS.len()];
    let mut stream = script.rest().to_vec();
    let mut at = 0;
    loop {
        let (stream, seal) = (&mut stream[at..], options & 1 == 1);
        let len = match options & KEYED {
            0 => one(stream, &limits, seal),
            _ => keyed(stream, &limits, seal),
        };
        let Some(len) = len else { return };
        at += len;
    }
}

/// The length of the request at the front; `None` if it is none, or does not end here.
fn one_request(stream: &mut [u8], limits: &Limits, seal: bool) -> Option<usize> {
    let (raw, rest) = stream.split_first_chunk_mut::<{ RequestHeader::LEN }>()?;
    let header = match RequestHeader::decode(raw, limits) {
        Ok(header) => header,
        Err(e) => return refused(&e),
    };
    assert_eq!(header.encode(), *raw, "decoded and encoded is what it was");
    assert!(header.descriptors <= limits.descriptors_max);
    assert!(header.notify_len <= limits.notify_max && header.payload_len <= limits.payload_max);
    assert_eq!(header.op == Op::Notify, header.descriptors == 0);
    assert_eq!(
        header.payload_follows(),
        if header.op == Op::Write { header.payload_len } else { 0 }
    );

    let (table, rest) = rest.split_at_mut_checked(header.table_len())?;
    let (notify, rest) = rest.split_at_mut_checked(header.notify_len as usize)?;
    if seal {
        RequestHeader::set_head_crc(raw, head_crc(raw, table, notify));
    }
    let verified = verify_head(raw, table, notify);
    assert_eq!(verified.is_ok(), header.seal(table, notify) == *raw);
    if verified.is_err() {
        return refused(&FrameError::Checksum);
    }
    one_flipped_bit_is_noticed(raw, table, notify);
    check_table(&header, table);
    if let Ok(word) = Notification::decode(notify) {
        same_again(&word, notify);
    }

    let payload_len = usize::try_from(header.payload_follows()).ok()?;
    let trailer_len = usize::try_from(header.trailer_follows()).ok()?;
    assert!(header.flags.contains(Flags::CHECKSUM) || trailer_len == 0);
    let (payload, rest) = rest.split_at_mut_checked(payload_len)?;
    let trailer = rest.get(..trailer_len)?;
    check_trailer(payload, trailer, header.flags.contains(Flags::CHECKSUM));
    Some(RequestHeader::LEN + table.len() + notify.len() + payload_len + trailer_len)
}

/// Like [`one_request`], for version 2.
fn one_keyed_request(
    stream: &mut [u8],
    limits: &Limits,
    seal: bool,
    keyed: &mut KeyedHeads,
) -> Option<usize> {
    let raw = stream.first_chunk::<{ RequestHeader::LEN }>()?;
    let header = match KeyedHeads::request(raw, limits) {
        Ok(header) => header,
        Err(e) => return refused(&e),
    };
    assert!(RequestHeader::decode(raw, limits).is_err(), "no head is of both versions");
    let len = RequestHeader::LEN + header.table_len() + header.notify_len as usize;
    let (head, rest) = stream.split_at_mut_checked(len)?;
    // Only the tag changes, and it does not depend on the bytes that were in its place.
    let (before, mut again) = (head.to_vec(), head.to_vec());
    keyed.seal_request(&header, &mut again);
    let tag = KeyedHeads::REQUEST_TAG;
    assert_eq!(
        (&again[..tag.start], &again[tag.end..]),
        (&before[..tag.start], &before[tag.end..])
    );
    if seal {
        head.copy_from_slice(&again);
    }
    let bit = crc32c(head) as usize % (len * 8);
    let mut damaged = again.clone();
    damaged[bit / 8] ^= 1 << (bit % 8);
    assert!(keyed.open_request(&mut damaged).is_err(), "bit {bit}");
    let is_sealed = *head == again;
    match keyed.open_request(head) {
        Ok(()) => assert!(is_sealed),
        Err(e) => {
            assert!(!is_sealed);
            return refused(&e);
        }
    }
    assert!(keyed.open_request(&mut again).is_err(), "a head is good for one place");
    let (table, notify) = head[RequestHeader::LEN..].split_at(header.table_len());
    check_table(&header, table);
    if let Ok(word) = Notification::decode(notify) {
        same_again(&word, notify);
    }
    // Payload and trailer are those of version 1.
    let follows = header.payload_follows().checked_add(header.trailer_follows())?;
    let follows = usize::try_from(follows).ok().filter(|len| *len <= rest.len())?;
    Some(len + follows)
}

fn refused<T>(error: &FrameError) -> Option<T> {
    assert!(!error.code().is_ok() && !error.to_string().is_empty());
    None
}

fn one_flipped_bit_is_noticed(raw: &[u8; RequestHeader::LEN], table: &[u8], notify: &[u8]) {
    // Which one depends on the bytes, so that a run sees them all.
    let bit = crc32c(raw) as usize % ((raw.len() + table.len() + notify.len()) * 8);
    let mut head = [&raw[..], table, notify].concat();
    head[bit / 8] ^= 1 << (bit % 8);
    let (raw, rest) = head.split_first_chunk().expect("as long as before");
    let (table, notify) = rest.split_at(table.len());
    assert_eq!(verify_head(raw, table, notify), Err(FrameError::Checksum), "bit {bit}");
}

fn check_table(header: &RequestHeader, table: &[u8]) {
    let naive: Vec<_> = table
        .chunks(WireDescriptor::LEN)
        .map(|entry| WireDescriptor::read(entry.try_into().expect("a table of whole entries")))
        .collect();
    let sum: u128 = naive.iter().map(|d| u128::from(d.len)).sum();
    match header.decode_table(table) {
        Ok(descriptors) => {
            assert_eq!(sum, u128::from(header.payload_len));
            let mut again = Vec::new();
            descriptors.iter().for_each(|d| d.write_to(&mut again));
            assert_eq!((descriptors.len(), again.as_slice()), (header.descriptors as usize, table));
        }
        Err(_) => assert_ne!(sum, u128::from(header.payload_len), "refused without a reason"),
    }
    assert!(header.decode_table(&[table, &[0]].concat()).is_err(), "a table too long");
}

fn check_trailer(payload: &[u8], trailer: &[u8], checksummed: bool) {
    if !checksummed {
        return;
    }
    let mut digest = PieceDigest::new();
    digest.update(payload);
    let ours = digest.clone().finish_trailer();
    match digest.verify(trailer) {
        Ok(()) => assert_eq!(ours, trailer),
        Err(piece) => {
            assert_eq!(ours[..piece * 4], trailer[..piece * 4]);
            assert_ne!(ours[piece * 4..][..4], trailer[piece * 4..][..4]);
        }
    }
}

/// A stream of answers behind one byte of options, as for [`request`].
pub fn response(bytes: &[u8]) {
    let mut keyed = KeyedHeads::default();
    stream(bytes, one_response, |stream, limits, seal| {
        one_keyed_response(stream, limits, seal, &mut keyed)
    });
}

/// Like [`one_response`], for version 2.
fn one_keyed_response(
    stream: &mut [u8],
    limits: &Limits,
    seal: bool,
    keyed: &mut KeyedHeads,
) -> Option<usize> {
    let (raw, rest) = stream.split_first_chunk_mut::<{ KeyedHeads::ANSWER_LEN }>()?;
    let mut right = *raw;
    keyed.put_right(&mut right);
    if seal {
        *raw = right;
    }
    let mut damaged = right;
    let bit = crc32c(raw) as usize % (raw.len() * 8);
    damaged[bit / 8] ^= 1 << (bit % 8);
    assert!(keyed.open_answer(&mut damaged, limits).is_err(), "bit {bit}");
    let is_sealed = *raw == right;
    let header = match keyed.open_answer(raw, limits) {
        Ok(header) => header,
        Err(e) => return refused(&e),
    };
    assert!(is_sealed, "a tag that does not fit was taken");
    assert!(header.payload_len <= limits.payload_max);
    assert!(header.payload_len == 0 || header.code.is_ok(), "failures carry no payload");
    let follows = header.payload_len.checked_add(header.trailer_follows())?;
    let follows = usize::try_from(follows).ok().filter(|len| *len <= rest.len())?;
    Some(KeyedHeads::ANSWER_LEN + follows)
}

fn one_response(stream: &mut [u8], limits: &Limits, seal: bool) -> Option<usize> {
    const CRC: std::ops::Range<usize> = 20..24;
    let (raw, rest) = stream.split_first_chunk_mut::<{ ResponseHeader::LEN }>()?;
    if seal {
        raw[CRC].fill(0);
        let crc = crc32c(raw);
        raw[CRC].copy_from_slice(&crc.to_le_bytes());
    }
    let header = match ResponseHeader::decode(raw, limits) {
        Ok(header) => header,
        Err(e) => return refused(&e),
    };
    assert_eq!(header.encode(), *raw, "decoded and encoded is what it was");
    assert!(header.payload_len <= limits.payload_max);
    assert!(header.payload_len == 0 || header.code.is_ok(), "failures carry no payload");
    let mut damaged = *raw;
    let bit = crc32c(raw) as usize % (raw.len() * 8);
    damaged[bit / 8] ^= 1 << (bit % 8);
    assert!(ResponseHeader::decode(&damaged, limits).is_err(), "bit {bit}");

    let payload_len = usize::try_from(header.payload_len).ok()?;
    let trailer_len = usize::try_from(header.trailer_follows()).ok()?;
    let (payload, rest) = rest.split_at_mut_checked(payload_len)?;
    check_trailer(payload, rest.get(..trailer_len)?, header.flags.contains(Flags::CHECKSUM));
    Some(ResponseHeader::LEN + payload_len + trailer_len)
}

/// Checksums of a payload made from a few bytes: however it passes by, they are the same.
pub fn checksums(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    // Around one, two and three pieces, and what is not near any.
    let near = script.below(4) * CHECKSUM_PIECE + usize::from(script.byte());
    let len = near.saturating_sub(usize::from(script.byte()));
    let steps: [usize; 4] = std::array::from_fn(|_| 1 + usize::from(script.short()) * 7);
    let flip = script.word();
    let seed = script.rest();
    let payload: Vec<u8> =
        (0..len).map(|i| seed.get(i % (seed.len() + 1)).copied().unwrap_or(i as u8)).collect();

    let mut digest = PieceDigest::new();
    let mut parts = 0u32;
    let (mut at, mut steps) = (0, steps.into_iter().cycle());
    while at < len {
        let step = steps.next().expect("cycles").min(len - at);
        digest.update(&payload[at..at + step]);
        parts = crc32c_append(parts, &payload[at..at + step]);
        at += step;
        assert_eq!(digest.len(), at as u64);
    }
    assert_eq!(parts, crc32c(&payload));
    let trailer: Vec<u8> =
        payload.chunks(CHECKSUM_PIECE).flat_map(|piece| crc32c(piece).to_le_bytes()).collect();
    assert_eq!(trailer.len() as u64, trailer_len(len as u64));
    assert_eq!(digest.is_empty(), len == 0);
    assert_eq!(digest.clone().finish_trailer(), trailer);
    assert_eq!(digest.clone().verify(&trailer), Ok(()));
    if len > 0 {
        let bit = (flip % (trailer.len() as u64 * 8)) as usize;
        let mut damaged = trailer.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(digest.clone().verify(&damaged), Err(bit / 32), "the piece that differs");
        let short = digest.verify(&trailer[..trailer.len() - 1]);
        assert_eq!(short, Err(trailer.len() / 4 - 1));
    }
}

/// Decodes a notification, behind one byte that chooses the limits.
pub fn notification(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let limits = script.pick(&LIMITS);
    let bytes = script.rest();
    match Notification::decode(bytes) {
        Ok(word) => {
            same_again(&word, bytes);
            let mut out = vec![9];
            let fits = word.encoded_len() as u64 <= limits.notify_max.into();
            assert_eq!(word.write_to(&mut out, &limits).is_ok(), fits);
            assert_eq!(out.len(), if fits { 1 + bytes.len() } else { 1 }, "all of it or nothing");
        }
        Err(e) => assert!(matches!(e, FrameError::Inconsistent(_))),
    }
}

fn same_again(word: &Notification, bytes: &[u8]) {
    let mut again = Vec::new();
    word.write_to(&mut again, &LIMITS[2]).expect("without a limit");
    assert_eq!((again.as_slice(), word.encoded_len()), (bytes, bytes.len()));
}

/// A request with what follows it; with keyed tags, if they are given.
fn sealed(
    op: Op,
    lens: &[u32],
    word: &str,
    checksum: bool,
    keyed: Option<&mut KeyedHeads>,
) -> Vec<u8> {
    let mut table = Vec::new();
    for (i, &len) in lens.iter().enumerate() {
        let region = RegionId(i as u32);
        WireDescriptor { offset: 4096 * i as u64, len, region }.write_to(&mut table);
    }
    let mut notify = Vec::new();
    if !word.is_empty() {
        let word = Notification { name: word.to_owned(), message: b"said".to_vec() };
        word.write_to(&mut notify, &LIMITS[0]).expect("short");
    }
    let payload_len: u64 = lens.iter().map(|&len| u64::from(len)).sum();
    let header = RequestHeader {
        op,
        flags: Flags::with_checksum(checksum),
        descriptors: lens.len() as u32,
        notify_len: notify.len() as u32,
        payload_len,
        transfer: TransferId(7),
        budget_ms: 1000,
        head_crc: 0,
    };
    let payload = vec![0x5a; header.payload_follows() as usize];
    let mut digest = PieceDigest::new();
    digest.update(&payload);
    let trailer = if checksum && op == Op::Write { digest.finish_trailer() } else { Vec::new() };
    let mut head = [&header.seal(&table, &notify)[..], &table, &notify].concat();
    if let Some(keyed) = keyed {
        keyed.seal_request(&header, &mut head);
    }
    [&head[..], &payload, &trailer].concat()
}

/// Requests of honest initiators.
pub fn request_seeds() -> Vec<Vec<u8>> {
    let write = sealed(Op::Write, &[16, 8], "block", true, None);
    let read = sealed(Op::Read, &[4096, 1], "", false, None);
    let notify = sealed(Op::Notify, &[], "done", false, None);
    let plain = sealed(Op::Write, &[5], "", false, None);
    let mut seeds: Vec<_> =
        [&write, &read, &notify, &plain].map(|one| [&[0][..], one].concat()).into();
    let mut stream = vec![1];
    [&plain, &read, &write, &notify].into_iter().for_each(|one| stream.extend_from_slice(one));
    seeds.push(stream);
    // The same with keyed tags, each head in its place.
    let mut keyed = KeyedHeads::default();
    let mut stream = vec![KEYED];
    stream.extend(sealed(Op::Write, &[5], "", false, Some(&mut keyed)));
    seeds.push(stream.clone());
    stream.extend(sealed(Op::Read, &[4096, 1], "", false, Some(&mut keyed)));
    stream.extend(sealed(Op::Write, &[16, 8], "block", true, Some(&mut keyed)));
    stream.extend(sealed(Op::Notify, &[], "done", false, Some(&mut keyed)));
    seeds.push([&[KEYED | 1], &stream[1..]].concat());
    seeds.push(stream);
    seeds
}

/// Answers of honest targets.
pub fn response_seeds() -> Vec<Vec<u8>> {
    let header = ResponseHeader {
        code: WireCode::Ok,
        flags: Flags::NONE,
        transfer: TransferId(7),
        index: 0,
        aux: 0,
        payload_len: 0,
    };
    let failed = ResponseHeader { code: WireCode::OutOfBounds, index: 3, aux: 9, ..header };
    let later = ResponseHeader { code: WireCode::Other(999), ..header };
    let data = ResponseHeader { payload_len: 5, flags: Flags::CHECKSUM, ..header };
    let data = [&data.encode()[..], b"bytes", &crc32c(b"bytes").to_le_bytes()].concat();
    let heads = [header.encode(), failed.encode(), later.encode()].concat();
    let mut keyed = KeyedHeads::default();
    let tagged = [header, failed, later].map(|one| keyed.seal_answer(&one)).concat();
    vec![
        [&[0][..], &heads].concat(),
        [&[1][..], &data, &heads].concat(),
        [&[KEYED][..], &tagged].concat(),
        [&[KEYED | 1][..], &tagged].concat(),
    ]
}

/// Lengths around the borders of pieces.
pub fn checksums_seeds() -> Vec<Vec<u8>> {
    (0..4)
        .map(|pieces| vec![pieces, 1, pieces & 1, 9, 0, 200, 30, 7, 0, 255, 255, 3, 2, 1])
        .collect()
}

/// Notifications of honest peers.
pub fn notification_seeds() -> Vec<Vec<u8>> {
    [("", ""), ("name", "message"), ("äöü", "")]
        .map(|(name, message)| {
            let word = Notification { name: name.to_owned(), message: message.into() };
            let mut bytes = vec![0];
            word.write_to(&mut bytes, &LIMITS[0]).expect("short");
            bytes
        })
        .into()
}
