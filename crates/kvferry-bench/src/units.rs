//! Sizes and durations as people write and read them.

use std::time::Duration;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// Reads `4096`, `4KiB`, `1.5GiB` or `16M` as bytes. Decimal and binary suffixes mean the same power of
/// two: sizes of a KV cache are never multiples of 1000.
///
/// # Errors
/// A sentence that names the text.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let unit = match suffix.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => KIB,
        "m" | "mb" | "mib" => MIB,
        "g" | "gb" | "gib" => GIB,
        "t" | "tb" | "tib" => TIB,
        _ => return Err(format!("`{text}` is not a size such as 4096, 32KiB or 1.5GiB")),
    };
    let value: f64 =
        number.parse().map_err(|_| format!("`{text}` does not start with a number"))?;
    let bytes = value * unit as f64;
    if bytes < 1.0 || bytes > (1u64 << 50) as f64 {
        return Err(format!("`{text}` is not between 1 byte and 1024 TiB"));
    }
    Ok(bytes as u64)
}

/// Writes bytes as `64 KiB` or `1.5 GiB`.
pub fn bytes(value: u64) -> String {
    let (unit, name) = match value {
        TIB.. => (TIB, "TiB"),
        GIB.. => (GIB, "GiB"),
        MIB.. => (MIB, "MiB"),
        KIB.. => (KIB, "KiB"),
        _ => return format!("{value} B"),
    };
    if value.is_multiple_of(unit) {
        format!("{} {name}", value / unit)
    } else {
        format!("{:.1} {name}", value as f64 / unit as f64)
    }
}

/// Writes a duration as `12.3 ms`, with three significant digits at every scale.
pub fn duration(value: Duration) -> String {
    let seconds = value.as_secs_f64();
    let (scaled, name) = match seconds {
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "µs"),
    };
    format!("{} {name}", figure(scaled))
}

/// Writes three significant digits without an exponent.
pub fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// Three decimals, so that a ratio just below its bound does not look like the bound.
pub(crate) fn ratio(value: f64) -> String {
    format!("{value:.3}")
}

/// Writes `163 840`: digits in groups of three.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut grouped = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(' ');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_suffix() {
        for (text, value) in [
            ("4096", 4096),
            ("4KiB", 4096),
            ("4k", 4096),
            ("1.5 GiB", 3 << 29),
            ("16M", 16 << 20),
            ("7b", 7),
            ("1024 TiB", 1 << 50),
        ] {
            assert_eq!(parse_bytes(text), Ok(value), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_text_in_the_message() {
        for text in ["", "KiB", "4XiB", "-1", "0", "1e30", "99999999999GiB"] {
            let refusal = parse_bytes(text).expect_err(text);
            assert!(refusal.contains(text), "{refusal}");
        }
    }

    #[test]
    fn figures_read_well_at_every_scale() {
        assert_eq!(bytes(65536), "64 KiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(duration(Duration::from_micros(12_340)), "12.3 ms");
        assert_eq!(duration(Duration::from_millis(2_500)), "2.50 s");
        assert_eq!(figure(123.4), "123");
        assert_eq!(figure(0.023), "0.0230");
        assert_eq!(count(163_840), "163 840");
        assert_eq!(count(12), "12");
    }
}
