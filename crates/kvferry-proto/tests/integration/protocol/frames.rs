//! Data frames and checksums. The targets `request`, `response`, `notification` and `checksums` of
//! `kvferry-models` prove that frames survive the wire and that any bytes are read or refused.

use kvferry_proto::frame::{head_crc, piece_count, trailer_len, verify_head};
use kvferry_proto::{
    CHECKSUM_PIECE, Flags, FrameError, Limits, Notification, Op, RegionId, RequestHeader,
    ResponseHeader, TransferId, WireCode, WireDescriptor, crc32c,
};

const WRITE: RequestHeader = RequestHeader {
    op: Op::Write,
    flags: Flags::CHECKSUM,
    descriptors: 2,
    notify_len: 7,
    payload_len: 0x1122,
    transfer: TransferId(0x0102_0304_0506_0708),
    budget_ms: 30_000,
    head_crc: 0xdead_beef,
};

const ANSWER: ResponseHeader = ResponseHeader {
    code: WireCode::OutOfBounds,
    flags: Flags::NONE,
    transfer: TransferId(0x0102_0304_0506_0708),
    index: 3,
    aux: 0x1000,
    payload_len: 0,
};

#[test]
fn headers_are_these_bytes_for_ever() {
    let mut request = [0; 64];
    request[..36].copy_from_slice(
        b"KVFq\x01\x01\x01\0\x02\0\0\0\x07\0\0\0\x22\x11\0\0\0\0\0\0\
          \x08\x07\x06\x05\x04\x03\x02\x01\x30\x75\0\0",
    );
    request[60..].copy_from_slice(b"\xef\xbe\xad\xde");
    assert_eq!(WRITE.encode(), request);

    let answer = *b"KVFr\x01\0\0\x01\x08\x07\x06\x05\x04\x03\x02\x01\x03\0\0\0\
        \xf5\x49\x37\x19\0\x10\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    assert_eq!(ANSWER.encode().escape_ascii().to_string(), answer.escape_ascii().to_string());

    let mut descriptor = Vec::new();
    WireDescriptor { offset: 0x0102_0304_0506_0708, len: 0x0a0b_0c0d, region: RegionId(5) }
        .write_to(&mut descriptor);
    assert_eq!(descriptor, b"\x08\x07\x06\x05\x04\x03\x02\x01\x0d\x0c\x0b\x0a\x05\0\0\0");

    let mut notification = Vec::new();
    Notification { name: "ab".into(), message: vec![9] }
        .write_to(&mut notification, &Limits::default())
        .unwrap();
    assert_eq!(notification, b"\x02\0\0\0ab\x09");
}

#[test]
fn the_head_is_covered_by_its_checksum_to_the_last_bit() {
    let (table, notify) = ([7u8; 32], *b"\x02\0\0\0ab\x09");
    let sealed = WRITE.seal(&table, &notify);
    assert_eq!(verify_head(&sealed, &table, &notify), Ok(()));
    let bits = (sealed.len() + table.len() + notify.len()) * 8;
    for bit in 0..bits {
        let mut head = [&sealed[..], &table, &notify].concat();
        head[bit / 8] ^= 1 << (bit % 8);
        let (header, rest) = head.split_first_chunk::<64>().unwrap();
        let (table, notify) = rest.split_at(32);
        assert_eq!(verify_head(header, table, notify), Err(FrameError::Checksum), "bit {bit}");
    }
    // Moving bytes from the table to the notification is caught by the lengths in the header;
    // the checksum itself is over their concatenation.
    assert_eq!(
        head_crc(&sealed, &table, &notify),
        head_crc(&sealed, &[], &[&table[..], &notify].concat())
    );
}

#[test]
fn an_answer_is_covered_by_its_checksum_to_the_last_bit() {
    let sealed = ANSWER.encode();
    for bit in 0..sealed.len() * 8 {
        let mut answer = sealed;
        answer[bit / 8] ^= 1 << (bit % 8);
        assert!(ResponseHeader::decode(&answer, &Limits::default()).is_err(), "bit {bit}");
    }
}

#[test]
fn headers_out_of_range_or_at_odds_with_themselves_are_refused() {
    let limits = Limits { descriptors_max: 10, notify_max: 100, payload_max: 1 << 40 };
    let code = |header: RequestHeader| {
        RequestHeader::decode(&header.encode(), &limits).expect_err("refused").code()
    };
    assert_eq!(code(RequestHeader { descriptors: 11, ..WRITE }), WireCode::TooLarge);
    assert_eq!(code(RequestHeader { notify_len: 101, ..WRITE }), WireCode::TooLarge);
    assert_eq!(code(RequestHeader { payload_len: (1 << 40) + 1, ..WRITE }), WireCode::TooLarge);
    let nameable = 2 * u64::from(u32::MAX);
    assert!(
        RequestHeader::decode(&RequestHeader { payload_len: nameable, ..WRITE }.encode(), &limits)
            .is_ok()
    );
    assert_eq!(code(RequestHeader { payload_len: nameable + 1, ..WRITE }), WireCode::Malformed);
    for op in [Op::Write, Op::Read] {
        for payload_len in [0, 5] {
            let empty = RequestHeader { op, descriptors: 0, payload_len, ..WRITE };
            assert_eq!(code(empty), WireCode::Malformed);
        }
    }
    let notify = RequestHeader { op: Op::Notify, descriptors: 0, payload_len: 0, ..WRITE };
    assert_eq!(RequestHeader::decode(&notify.encode(), &limits), Ok(notify));
    assert_eq!(code(RequestHeader { descriptors: 1, ..notify }), WireCode::Malformed);
    assert_eq!(code(RequestHeader { payload_len: 1, ..notify }), WireCode::Malformed);
    assert_eq!(code(RequestHeader { notify_len: 0, ..notify }), WireCode::Malformed);

    let patched = |at: usize, byte: u8| {
        let mut bytes = WRITE.encode();
        bytes[at] = byte;
        RequestHeader::decode(&bytes, &limits).expect_err("refused").code()
    };
    assert_eq!(patched(0, b'X'), WireCode::Malformed);
    assert_eq!(patched(4, 2), WireCode::VersionMismatch);
    assert_eq!(patched(5, 0), WireCode::Unsupported);
    assert_eq!(patched(5, 4), WireCode::Unsupported);
    assert_eq!(patched(6, 2), WireCode::Unsupported);
    for reserved in (7..8).chain(36..60) {
        assert_eq!(patched(reserved, 1), WireCode::Malformed, "byte {reserved}");
    }
}

#[test]
fn answers_out_of_range_or_at_odds_with_themselves_are_refused() {
    let limits = Limits { payload_max: 100, ..Limits::default() };
    let ok = ResponseHeader { code: WireCode::Ok, payload_len: 100, ..ANSWER };
    assert_eq!(ResponseHeader::decode(&ok.encode(), &limits), Ok(ok));
    let code = |header: ResponseHeader| {
        ResponseHeader::decode(&header.encode(), &limits).expect_err("refused").code()
    };
    assert_eq!(code(ResponseHeader { payload_len: 101, ..ok }), WireCode::TooLarge);
    assert_eq!(code(ResponseHeader { payload_len: 1, ..ANSWER }), WireCode::Malformed);
    assert_eq!(code(ResponseHeader { flags: Flags(0x80), ..ANSWER }), WireCode::Unsupported);
    let future = ResponseHeader { code: WireCode::Other(4711), ..ANSWER };
    assert_eq!(ResponseHeader::decode(&future.encode(), &limits), Ok(future), "codes may be new");
}

#[test]
fn what_follows_a_header_is_counted_by_it() {
    assert_eq!(
        (WRITE.table_len(), WRITE.payload_follows(), WRITE.trailer_follows()),
        (32, 0x1122, 4)
    );
    let read = RequestHeader { op: Op::Read, ..WRITE };
    assert_eq!((read.table_len(), read.payload_follows(), read.trailer_follows()), (32, 0, 0));
    let plain = RequestHeader { flags: Flags::NONE, ..WRITE };
    assert_eq!(plain.trailer_follows(), 0);
    let answer = ResponseHeader { flags: Flags::CHECKSUM, payload_len: 1 << 20, ..ANSWER };
    assert_eq!(answer.trailer_follows(), 16);
    let piece = CHECKSUM_PIECE as u64;
    for (len, pieces) in [(0, 0), (1, 1), (piece, 1), (piece + 1, 2), (10 * piece, 10)] {
        assert_eq!((piece_count(len), trailer_len(len)), (pieces, pieces * 4));
    }
}

#[test]
fn a_table_must_add_up_to_the_payload() {
    let descriptors = [
        WireDescriptor { offset: 0, len: 0x1000, region: RegionId(1) },
        WireDescriptor { offset: u64::MAX, len: 0x122, region: RegionId::ABSOLUTE },
    ];
    let mut table = Vec::new();
    descriptors.iter().for_each(|descriptor| descriptor.write_to(&mut table));
    assert_eq!(WRITE.decode_table(&table).unwrap(), descriptors);
    assert!(WRITE.decode_table(&table[1..]).is_err());
    assert!(RequestHeader { payload_len: 0x1121, ..WRITE }.decode_table(&table).is_err());
    assert!(RequestHeader { descriptors: 3, ..WRITE }.decode_table(&table).is_err());
    // As large as they can be, the lengths still add up without overflow.
    let huge = WireDescriptor { offset: 0, len: u32::MAX, region: RegionId(1) };
    let mut table = Vec::new();
    huge.write_to(&mut table);
    huge.write_to(&mut table);
    let header = RequestHeader { payload_len: 2 * u64::from(u32::MAX), ..WRITE };
    assert_eq!(header.decode_table(&table).unwrap(), [huge, huge]);
}

#[test]
fn notifications_are_bounded_and_checked() {
    let limits = Limits { notify_max: 10, ..Limits::default() };
    let fits = Notification { name: "abc".into(), message: vec![1, 2, 3] };
    let mut out = Vec::new();
    fits.write_to(&mut out, &limits).unwrap();
    assert_eq!((out.len(), fits.encoded_len()), (10, 10));
    assert_eq!(Notification::decode(&out).unwrap(), fits);
    let large = Notification { message: vec![0; 4], ..fits };
    assert_eq!(large.write_to(&mut out, &limits).unwrap_err().code(), WireCode::TooLarge);
    assert_eq!(out.len(), 10, "nothing was appended");
    for bad in [&b"\x01\0\0"[..], b"\x02\0\0\0a", b"\xff\xff\xff\xffab", b"\x01\0\0\0\xff"] {
        assert_eq!(Notification::decode(bad).unwrap_err().code(), WireCode::Malformed);
    }
}

#[test]
fn crc32c_is_castagnolis() {
    // The check value of the catalogue, and the examples of RFC 3720, B.4.
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    assert_eq!(crc32c(b""), 0);
}
