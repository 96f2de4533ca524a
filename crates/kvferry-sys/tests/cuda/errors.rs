//! Meaning of the driver's errors.

use kvferry_sys::cuda::{DriverError, Error};

#[test]
fn errors_that_end_a_context_or_its_device_are_told_from_those_of_one_call() {
    let of = |code| DriverError { call: "cuEventQuery", code, name: "", message: "" };
    let contexts =
        [4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999];
    for code in contexts {
        assert!(of(code).is_sticky() && !of(code).is_device_gone(), "{code}");
        assert!(Error::from(of(code)).is_fatal(), "{code}");
    }
    for code in [46, 100, 101] {
        assert!(of(code).is_device_gone() && !of(code).is_sticky(), "{code}");
        assert!(Error::from(of(code)).is_fatal(), "{code}");
    }
    for code in [1, 2, 3, 201, 205, 217, 400, 500, 600, 701, 704, 712, 713, 800, 801, 900, 907] {
        assert!(!Error::from(of(code)).is_fatal(), "{code}");
    }
    assert!(!Error::NullEvent.is_fatal());
}

#[test]
fn the_error_of_an_unknown_device_says_what_to_do_before_it_lists_the_devices() {
    let device = |at| format!("{at} (GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0, 0000:1b:00.0)");
    let seen: Vec<String> = (0..8).map(device).collect();
    let text = Error::NoSuchDevice { name: "8".into(), seen: seen.clone() }.to_string();
    let listed = text.find(&seen[0]).expect("the devices are listed");
    assert!(text[..listed].contains("check CUDA_VISIBLE_DEVICES"), "{text}");
    assert!(text.ends_with(&seen.join(", ")), "{text}");
    let none = Error::NoSuchDevice { name: "8".into(), seen: Vec::new() }.to_string();
    assert!(none.ends_with("it sees none"), "{none}");
}
