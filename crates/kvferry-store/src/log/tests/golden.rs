//! The bytes of the formats, and the bounds of their sizes.

use super::*;

#[test]
fn the_largest_block_fits_into_an_empty_segment_and_one_byte_more_does_not() {
    let geometry = Geometry::new(Geometry::MIN_SEGMENT_BYTES).unwrap();
    let disk = SimDisk::new(geometry, 1);
    let (directory, directories) = (0, 1);
    let store = Superblock { store: STORE, geometry, created_ms: 0, directory, directories, id: 1 };
    let mut appender = Appender::begin(&disk, geometry, segment_header(0, 1)).unwrap();
    let mut data = random_data(1, geometry.max_block_bytes() as usize + 1);
    assert!(appender.plan(&[block(1, &data)]).is_none());
    data.pop();
    let extent = appender.plan(&[block(1, &data)]).unwrap();
    extent.write(&disk, [memory(&data)]).unwrap();
    appender.finished(extent, true);
    appender.seal(&disk).unwrap();
    let scanned = scan(&disk, &store, 0).unwrap().unwrap();
    assert_eq!(scanned.end, geometry.pages() - 2);
    assert!(verify(&disk, &scanned).is_empty());
}

#[test]
fn sizes_of_segments_are_bounded_and_places_name_pages_over_all_segments() {
    for bytes in [0, 4096, (1 << 20) - 4096, (1 << 20) + 512, (4 << 30) + 4096] {
        assert_eq!(Geometry::new(bytes), None);
    }
    for bytes in [1 << 20, (1 << 20) + 4096, 1 << 30, 4 << 30] {
        let geometry = Geometry::new(bytes).unwrap();
        assert_eq!(geometry.segment_bytes(), bytes);
        let last = (geometry.max_segments() - 1, geometry.pages() - 1);
        assert_eq!(geometry.locate(geometry.place(last.0, last.1)), last);
    }
}

#[test]
fn the_bytes_of_version_1_do_not_change() {
    let header = SegmentHeader {
        store: STORE,
        segment: 3,
        incarnation: 4,
        nonce: *b"0123456789abcdef",
        created_ms: 1_763_900_000_000,
    };
    let block = Block {
        key: [1, 2],
        parent: Some([3, 4]),
        sum: format::sum(b"data", 5),
        check: 5,
        namespace: 6,
        len: 4,
        retention: 7,
        time: 8,
    };
    let records = [Record { block, page: 2 }, Record { block, page: 3 }];
    let sums = [
        crc_fast::crc64_nvme(&header.encode().0),
        crc_fast::crc64_nvme(&header.encode_extent(1, &records).0),
        crc_fast::crc64_nvme(&header.encode_footer(Geometry::tiny(10), &records).1),
    ];
    assert_eq!(sums, [0x50ad_1cab_9762_16c7, 0xe5f2_e3c2_a1b4_869c, 0xeb0d_ac4d_f0df_9b43]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn what_is_planned_is_disjoint_in_bounds_and_scanned_again(
        pages in 8_u32..120,
        sizes in prop::collection::vec((0_u32..5 * 4096, any::<bool>()), 1..150),
        at_once in 1_usize..80,
        is_sealed in any::<bool>(),
    ) {
        let store = superblock(pages);
        let disk = SimDisk::new(store.geometry, 1);
        let mut appender = Appender::begin(&disk, store.geometry, segment_header(0, 7)).unwrap();
        let blocks: Vec<_> = sizes
            .iter()
            .enumerate()
            .map(|(key, (len, _))| block(key as u64 + 1, &random_data(key as u64 + 1, *len as usize)))
            .collect();
        let mut extents = Vec::new();
        let mut rest = &blocks[..];
        while let Some(extent) = appender.plan(&rest[..rest.len().min(at_once)]) {
            prop_assert!((1..=EXTENT_RECORDS).contains(&extent.records().len()));
            rest = &rest[extent.records().len()..];
            extents.push(extent);
        }
        Rng::with_seed(pages.into()).shuffle(&mut extents);
        let mut expected = Vec::new();
        let mut taken = FxHashSet::from_iter([0]);
        for extent in extents {
            prop_assert!(taken.insert(extent.header().0 / PAGE_BYTES as u64));
            for record in extent.records() {
                for page in u64::from(record.page)..record.end() {
                    prop_assert!(page < pages.into() && taken.insert(page));
                }
            }
            let data = extent.records().iter().map(|r| {
                memory(&random_data(r.block.key[0], r.block.len as usize))
            });
            extent.write(&disk, data).unwrap();
            let is_written = sizes[extent.records()[0].block.key[0] as usize - 1].1;
            if is_written || !is_sealed {
                expected.extend_from_slice(extent.records());
            }
            appender.finished(extent, is_written);
        }
        if is_sealed {
            appender.seal(&disk).unwrap();
        }
        let mut scanned = scan(&disk, &store, 0).unwrap().unwrap();
        prop_assert_eq!(scanned.is_sealed, is_sealed);
        prop_assert!(verify(&disk, &scanned).is_empty());
        scanned.records.sort_unstable_by_key(|record| record.page);
        expected.sort_unstable_by_key(|record| record.page);
        prop_assert_eq!(scanned.records, expected);
    }
}
