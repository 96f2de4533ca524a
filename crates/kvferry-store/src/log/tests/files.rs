//! Tests of a log in files.

use super::*;

/// Segments as files, without direct I/O.
struct FileDisk {
    directory: std::path::PathBuf,
    segment_bytes: u64,
}

impl FileDisk {
    fn new(name: &str, geometry: Geometry) -> Self {
        let directory =
            std::env::temp_dir().join(format!("kvferry-log-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        Self { directory, segment_bytes: geometry.segment_bytes() }
    }

    fn path(&self, segment: u32) -> std::path::PathBuf {
        self.directory.join(superblock::segment_file(segment))
    }

    fn open(&self, segment: u32) -> io::Result<std::fs::File> {
        std::fs::File::options().read(true).write(true).open(self.path(segment))
    }
}

impl Drop for FileDisk {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
}

impl Disk for FileDisk {
    type Memory = Memory;

    fn segments(&self) -> io::Result<Vec<u32>> {
        let mut segments = Vec::new();
        for entry in std::fs::read_dir(&self.directory)? {
            segments.extend(entry?.file_name().to_str().and_then(superblock::segment_of));
        }
        Ok(segments)
    }

    fn create(&self, segment: u32) -> io::Result<()> {
        std::fs::File::create_new(self.path(segment))?.set_len(self.segment_bytes)
    }

    fn remove(&self, segment: u32) -> io::Result<()> {
        std::fs::remove_file(self.path(segment))
    }

    fn read_at(&self, segment: u32, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.open(segment)?.read_exact_at(bytes, offset)
    }

    fn write_at(&self, segment: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.open(segment)?.write_all_at(bytes, offset)
    }

    fn write_blocks(
        &self,
        segment: u32,
        header: (u64, &[u8]),
        blocks: &[(u64, Memory)],
    ) -> io::Result<()> {
        self.write_at(segment, header.0, header.1)?;
        blocks
            .iter()
            .try_for_each(|(offset, memory)| self.write_at(segment, *offset, &memory.lock()))
    }

    fn read_blocks(&self, blocks: &[(u32, u64, Memory)]) -> io::Result<()> {
        blocks.iter().try_for_each(|(segment, offset, memory)| {
            self.read_at(*segment, *offset, &mut memory.lock())
        })
    }

    fn sync(&self, segment: u32) -> io::Result<()> {
        self.open(segment)?.sync_data()
    }
}

#[test]
fn threads_that_write_extents_of_one_segment_in_files_find_all_of_them_again() {
    let geometry = Geometry::new(4 << 20).unwrap();
    let disk = FileDisk::new("threads", geometry);
    let (directory, directories) = (0, 1);
    let store = Superblock { store: STORE, geometry, created_ms: 1, directory, directories, id: 1 };
    store.write(&disk.directory).unwrap();
    disk.create(0).unwrap();
    disk.create(1).unwrap();
    let appender = Mutex::new(Appender::begin(&disk, geometry, segment_header(1, 3)).unwrap());
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (disk, appender) = (&disk, &appender);
            scope.spawn(move || {
                for key in thread * 1000 + 1.. {
                    let data = random_data(key, 20_000);
                    let planned = appender.lock().plan(&[block(key, &data)]);
                    let Some(extent) = planned else { break };
                    let result = extent.write(disk, [memory(&data)]);
                    appender.lock().finished(extent, result.is_ok());
                }
            });
        }
    });
    let mut appender = appender.into_inner();
    appender.seal(&disk).unwrap();

    assert_eq!(Superblock::read(&disk.directory).unwrap(), Some((store, format::VERSION)));
    let mut segments = scan_all(&disk, &store).unwrap();
    segments.sort_unstable_by_key(|(segment, _)| *segment);
    let [(0, Ok(None)), (1, Ok(Some(scanned)))] = segments.as_slice() else {
        panic!("{segments:?}")
    };
    assert_eq!(scanned.records, appender.written());
    // 1024 pages: the header, six for each block, and four for the footer.
    assert_eq!(scanned.records.len(), (1024 - 1 - 4) / 6);
    assert!(verify(&disk, scanned).is_empty());
    let record = scanned.records[17];
    let read = memory(&vec![0; record.block.len as usize]);
    disk.read_blocks(&[(1, bytes_of(record.page), Arc::clone(&read))]).unwrap();
    assert_eq!(*read.lock(), padded(&random_data(record.block.key[0], 20_000)));
    disk.remove(0).unwrap();
    assert_eq!(disk.segments().unwrap(), [1]);
}

/// Measures; `cargo test --release -p kvferry-store -- --ignored --nocapture million`.
#[test]
#[ignore = "a measurement"]
fn a_million_blocks_are_listed_in_well_under_a_second() {
    let geometry = Geometry::new(4 << 30).unwrap();
    let disk = FileDisk::new("million", geometry);
    let (directory, directories) = (0, 1);
    let store = Superblock { store: STORE, geometry, created_ms: 1, directory, directories, id: 1 };
    disk.create(0).unwrap();
    let mut appender = Appender::begin(&disk, geometry, segment_header(0, 1)).unwrap();
    let blocks: Vec<_> = (1..=EXTENT_RECORDS as u64).map(|key| block(key, &[0; 4096])).collect();
    let started = std::time::Instant::now();
    while let Some(extent) = appender.plan(&blocks) {
        // Only headers: the data stays a hole in the file.
        let (at, header) = extent.header();
        disk.write_at(0, at, &header.0).unwrap();
        appender.finished(extent, true);
    }
    println!("{} blocks planned in {:?}", appender.written().len(), started.elapsed());
    for is_sealed in [false, true] {
        if is_sealed {
            appender.seal(&disk).unwrap();
        }
        let started = std::time::Instant::now();
        let scanned = scan(&disk, &store, 0).unwrap().unwrap();
        println!("scanned, sealed: {}: {:?}", scanned.is_sealed, started.elapsed());
        assert_eq!(scanned.records, appender.written());
    }
}
