//! Costs of known models of GPUs, used until a GPU has been measured.

use crate::calibration::{Calibration, Costs};
use crate::cost::{Cost, Curve};

/// Published figures of a model, and the rate that its bus allows. Rates are in GB/s.
struct Model {
    /// Words that tell the model in the driver's name of a GPU.
    names: &'static [&'static str],
    link: f64,
    copy_ns: f64,
    batch_call_ns: f64,
    batch_ns: f64,
    /// The longest time of an entry that the copy engine moves at [`SMALL`], its rate for small entries.
    small_ns: f64,
    kernel: Kernel,
    gather: Kernel,
}

struct Kernel {
    call_ns: f64,
    entry_ns: f64,
    rate: f64,
}

/// Rate of batches whose entries are below about 28 KiB, in GB/s. All GPUs with published figures have it.
const SMALL: f64 = 6.8;

const MODELS: [Model; 2] = [
    Model {
        names: &["H100", "H200", "H800", "H20", "GH200", "B100", "B200", "GB200"],
        link: 54.0,
        copy_ns: 2_300.0,
        batch_call_ns: 4_000.0,
        batch_ns: 600.0,
        small_ns: 900.0,
        kernel: Kernel { call_ns: 8_000.0, entry_ns: 15.0, rate: 42.0 },
        gather: Kernel { call_ns: 6_000.0, entry_ns: 5.0, rate: 900.0 },
    },
    Model {
        names: &["A100", "A800"],
        link: 25.0,
        copy_ns: 2_500.0,
        batch_call_ns: 4_000.0,
        batch_ns: 700.0,
        small_ns: 2_700.0,
        kernel: Kernel { call_ns: 9_000.0, entry_ns: 20.0, rate: 20.0 },
        gather: Kernel { call_ns: 7_000.0, entry_ns: 7.0, rate: 600.0 },
    },
];

impl Calibration {
    /// The calibration to begin with for a GPU of this name. The kernel has costs on models of which enough is
    /// published; on others it is used once it has been measured.
    pub fn of_model(name: &str) -> Self {
        let mut words = name.split(|c: char| !c.is_ascii_alphanumeric());
        let known = words.find_map(|word| MODELS.iter().find(|it| it.names.contains(&word)));
        known.map_or_else(Self::default, Model::calibration)
    }
}

impl Model {
    fn calibration(&self) -> Calibration {
        let copy = Cost { call_ns: 0.0, entry: rate(self.copy_ns, self.link) };
        let entry = curve(|bytes| {
            let small = (bytes / SMALL).min(self.small_ns);
            small.max(self.batch_ns).max(bytes / self.link)
        });
        let batch = Some(Cost { call_ns: self.batch_call_ns, entry });
        let [kernel, gather] = [&self.kernel, &self.gather].map(Kernel::cost);
        let out = Costs { copy, batch, kernel, gather };
        let mut calibration = Calibration::default();
        calibration.into.clone_from(&out);
        calibration.out = out;
        calibration
    }
}

impl Kernel {
    fn cost(&self) -> Option<Cost> {
        Some(Cost { call_ns: self.call_ns, entry: rate(self.entry_ns, self.rate) })
    }
}

fn rate(entry_ns: f64, rate: f64) -> Curve {
    Curve::of_rate(entry_ns, rate).expect("positive and rising")
}

fn curve(ns: impl Fn(f64) -> f64) -> Curve {
    let points = std::array::from_fn(|at| ns(Curve::bytes(at) as f64));
    Curve::new(points).expect("positive and rising")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Capabilities, Direction, Job, KernelLimits, Method, Staging, plan};

    const ALL: Capabilities = Capabilities {
        kernel: Some(KernelLimits { jobs_max: 4608, slice_bytes: 16 << 10 }),
        staging: Some(Staging { address: 1 << 40, bytes: 5 << 20 }),
        ..Capabilities::ENGINE
    };

    /// The methods for a stage full of scattered blocks.
    fn methods(name: &str, direction: Direction, block: u64) -> Vec<Method> {
        let jobs: Vec<Job> = (0..(4u64 << 20) / block)
            .map(|at| match direction {
                Direction::Out => {
                    Job { src: (1 << 41) + 2 * at * block, dst: at * block, len: block }
                }
                Direction::In => {
                    Job { src: at * block, dst: (1 << 41) + 2 * at * block, len: block }
                }
            })
            .collect();
        let planned = plan(&jobs, direction, &Calibration::of_model(name), &ALL).expect("valid");
        let mut methods: Vec<Method> = planned.steps.iter().map(|step| step.method).collect();
        methods.dedup();
        methods
    }

    #[test]
    fn known_models_copy_small_blocks_by_the_kernel_and_large_ones_by_the_copy_engine() {
        for name in ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"] {
            for block in [1 << 10, 4 << 10, 16 << 10, 28 << 10, 32 << 10] {
                let out = methods(name, Direction::Out, block);
                assert_eq!(out, [Method::Gather, Method::Copy], "{name}: {block}");
                let into = methods(name, Direction::In, block);
                assert_eq!(into, [Method::Copy, Method::Gather], "{name}: {block}");
            }
            for direction in [Direction::Out, Direction::In] {
                let large = methods(name, direction, 2 << 20);
                assert_eq!(large, [Method::Copy], "{name} {direction:?}");
            }
        }
    }

    #[test]
    fn what_the_copy_engine_does_as_fast_is_left_to_it() {
        for direction in [Direction::Out, Direction::In] {
            for block in [64 << 10, 128 << 10] {
                assert_eq!(methods("NVIDIA H100 80GB HBM3", direction, block), [Method::Batch]);
            }
        }
    }

    #[test]
    fn an_unknown_model_copies_by_the_copy_engine() {
        for name in ["NVIDIA GeForce RTX 9999", "", "H1000", "kvferry fake GPU"] {
            assert_eq!(Calibration::of_model(name), Calibration::default(), "{name}");
        }
    }
}
