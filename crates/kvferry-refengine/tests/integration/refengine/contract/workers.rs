//! Worker connectors: layers that are computed later, memory that they allocate, and ranks that panic.

use super::*;

#[test]
fn a_layer_is_computed_after_its_event_not_after_its_call() {
    for launch in [Launch::Eager, Launch::Deferred] {
        for threads in [false, true] {
            let mut config = tp(2);
            (config.launch, config.threads) = (launch, threads);
            let (seen, rows) = mpsc::channel();
            let hooked = Hooked::saving(move |caches, layer, computed| {
                seen.send((layer, computed.is_ready(), first_row(caches, layer))).unwrap();
            });
            let mut engine = Engine::new(config, hooked.connector(2, 1)).unwrap();
            submit(&mut engine, "a", 1);
            engine.step().unwrap();
            let caches = engine.caches(rank(1));
            for (layer, ready, seen) in rows.try_iter() {
                assert_eq!(ready, launch == Launch::Eager);
                let now = first_row(caches, layer);
                assert_eq!(seen, if ready { now } else { vec![0; 24] });
            }
        }
    }
}

/// A worker half that does only this.
struct Hooked {
    memory: Option<AllocateMemory>,
    start_load: fn(),
    save: SaveLayer,
    caches: Option<Arc<KvCaches>>,
}

type SaveLayer = Box<dyn FnMut(&KvCaches, usize, &LayerEvent) + Send>;

type AllocateMemory = Box<dyn FnMut(usize) -> Arc<dyn KvMemory> + Send>;

impl Hooked {
    fn saving(save: impl FnMut(&KvCaches, usize, &LayerEvent) + Send + 'static) -> Self {
        Self { memory: None, start_load: || {}, save: Box::new(save), caches: None }
    }

    /// A connector of `ranks` ranks, of which `rank` has this worker half.
    fn connector(self, ranks: usize, rank: usize) -> Connector {
        let mut connector = Script::new().connector(ranks);
        connector.workers[rank] = Box::new(self);
        Connector::Vllm(connector)
    }
}

impl WorkerConnector for Hooked {
    fn allocate_kv_memory(
        &mut self,
        _rank: Rank,
        _storage: usize,
        len_bytes: usize,
    ) -> Option<Arc<dyn KvMemory>> {
        self.memory.as_mut().map(|allocate| allocate(len_bytes))
    }

    fn register_kv_caches(&mut self, caches: &Arc<KvCaches>) {
        self.caches = Some(caches.clone());
    }

    fn bind_connector_metadata(&mut self, _meta: &ConnectorMeta) {}

    fn start_load_kv(&mut self) {
        (self.start_load)();
    }

    fn save_kv_layer(&mut self, layer: usize, computed: &LayerEvent) {
        (self.save)(self.caches.as_ref().unwrap(), layer, computed);
    }

    fn get_transfer_results(&mut self, _finished: &[RequestId]) -> TransferResults {
        TransferResults::default()
    }
}

/// The first row of a layer in the first block that is taken.
fn first_row(caches: &KvCaches, layer: usize) -> Vec<u8> {
    caches.row(&caches.layout.layers[layer], 0, BlockId(1), 0, 0)
}

#[test]
fn waiting_for_a_layer_computes_it_in_any_thread() {
    let mut config = tp(2);
    config.launch = Launch::Deferred;
    // Waits for each layer twice: in another thread, and in its own.
    let hooked = Hooked::saving(|caches, layer, computed| {
        assert!(!computed.is_ready());
        let other = computed.clone();
        std::thread::spawn(move || other.wait()).join().unwrap();
        computed.wait();
        assert!(computed.is_ready());
        assert_ne!(first_row(caches, layer), vec![0; 24]);
    });
    let mut engine = Engine::new(config, hooked.connector(2, 0)).unwrap();
    submit(&mut engine, "a", 3);
    assert_eq!(run(&mut engine).of("a"), continuation(&dense(), &prompt(1, 20), 3));
}

/// Memory of the connector that counts written bytes.
#[derive(Debug)]
struct Counted {
    memory: HeapMemory,
    written: Arc<AtomicUsize>,
}

impl KvMemory for Counted {
    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        self.memory.read(at, out);
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.written.fetch_add(bytes.len(), Ordering::Relaxed);
        self.memory.write(at, bytes);
    }
}

#[test]
fn a_connector_can_allocate_the_memory() {
    for short_bytes in [0, 1] {
        let written = Arc::new(AtomicUsize::new(0));
        let counted = written.clone();
        let mut hooked = Hooked::saving(|_, _, _| {});
        hooked.memory = Some(Box::new(move |len_bytes| {
            let memory = HeapMemory::new(len_bytes - short_bytes);
            Arc::new(Counted { memory, written: counted.clone() })
        }));
        let engine = Engine::new(tp(1), hooked.connector(1, 0));
        if short_bytes > 0 {
            let refused = engine.unwrap_err().to_string();
            assert_eq!(refused, "rank pp0tp0: the connector allocated 73727 bytes, expected 73728");
            continue;
        }
        let mut engine = engine.unwrap();
        submit(&mut engine, "a", 1);
        run(&mut engine);
        let written = written.load(Ordering::Relaxed);
        assert!(written >= 20 * 3 * 4 * 24, "{written}");
    }
}

#[test]
fn a_panicking_rank_ends_the_step_with_and_without_threads() {
    for threads in [false, true] {
        let mut config = tp(4);
        config.threads = threads;
        let mut hooked = Hooked::saving(|_, _, _| {});
        hooked.start_load = || panic!("no");
        let mut engine = Engine::new(config, hooked.connector(4, 2)).unwrap();
        submit(&mut engine, "a", 1);
        let step = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| engine.step()));
        assert_eq!(*step.unwrap_err().downcast_ref::<&str>().unwrap(), "no");
    }
}

#[test]
fn an_engine_may_be_moved_to_another_thread() {
    const fn movable<T: Send>() {}
    movable::<Engine>();
}
