//! Prometheus lines for counters that live elsewhere.

use std::fmt::{Display, Write};

/// Appends metric families to a text in the Prometheus format, version 0.0.4.
///
/// ```
/// # use atom_telemetry::{Exposition, Kind};
/// let mut out = String::new();
/// Exposition::new(&mut out)
///     .family(Kind::Counter, "atom_steps_total", "Steps taken.")
///     .sample(&[("lane", &0)], 12.0)
///     .sample(&[("lane", &1)], 11.0);
/// assert!(out.ends_with("atom_steps_total{lane=\"1\"} 11\n"));
/// ```
#[derive(Debug)]
pub struct Exposition<'a> {
    out: &'a mut String,
}

/// What a family's numbers mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows; the name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Observations by size, see [`Series::histogram`].
    Histogram,
}

/// One family, open for samples.
#[derive(Debug)]
pub struct Series<'a> {
    out: &'a mut String,
    name: &'a str,
}

impl<'a> Exposition<'a> {
    /// Writes behind what `out` already holds.
    pub fn new(out: &'a mut String) -> Self {
        Self { out }
    }

    /// Opens a family. Each name may be opened once in a scrape.
    ///
    /// Panics on a name that Prometheus would not read, and on a counter that doesn't say `_total`.
    pub fn family<'s>(&'s mut self, kind: Kind, name: &'s str, help: &str) -> Series<'s> {
        assert!(is_name(name), "'{name}' is not a Prometheus metric name");
        assert!(kind != Kind::Counter || name.ends_with("_total"), "counter '{name}' must end in _total");
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        let word = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        push(self.out, format_args!("# HELP {name} {help}\n# TYPE {name} {word}\n"));
        Series { out: self.out, name }
    }
}

impl Series<'_> {
    /// Writes one sample. Label values are escaped; label names are the caller's own words.
    pub fn sample(self, labels: &[(&str, &dyn Display)], value: f64) -> Self {
        self.line("", labels, value)
    }

    /// Writes a histogram: `counts[i]` observations were at most `bounds[i]` and above the bound before, and
    /// none is above the last. Bounds are ascending.
    pub fn histogram(
        mut self,
        labels: &[(&str, &dyn Display)],
        bounds: &[f64],
        counts: &[u64],
        sum: f64,
    ) -> Self {
        assert!(bounds.len() == counts.len(), "{} bounds for {} counts", bounds.len(), counts.len());
        let mut so_far = 0;
        for (bound, count) in bounds.iter().zip(counts) {
            so_far += count;
            let below: (&str, &dyn Display) = ("le", bound);
            self = self.line("_bucket", &[labels, &[below]].concat(), so_far as f64);
        }
        let all: (&str, &dyn Display) = ("le", &"+Inf");
        self.line("_bucket", &[labels, &[all]].concat(), so_far as f64).line("_sum", labels, sum).line(
            "_count",
            labels,
            so_far as f64,
        )
    }

    fn line(self, suffix: &str, labels: &[(&str, &dyn Display)], value: f64) -> Self {
        self.out.push_str(self.name);
        self.out.push_str(suffix);
        for (index, (name, label)) in labels.iter().enumerate() {
            let label = label.to_string().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let open = if index == 0 { '{' } else { ',' };
            push(self.out, format_args!("{open}{name}=\"{label}\""));
        }
        if !labels.is_empty() {
            self.out.push('}');
        }
        match value {
            v if v == f64::INFINITY => self.out.push_str(" +Inf\n"),
            v if v == f64::NEG_INFINITY => self.out.push_str(" -Inf\n"),
            v => push(self.out, format_args!(" {v}\n")),
        }
        self
    }
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("writing to a String can't fail");
}

fn is_name(name: &str) -> bool {
    let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit()) && name.chars().all(legal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_written_as_prometheus_reads_them() {
        let mut out = String::from("first_total 1\n");
        let mut exposition = Exposition::new(&mut out);
        exposition.family(Kind::Gauge, "atom_free_pages", "Pages nobody\nholds.").sample(&[], 3.5);
        exposition
            .family(Kind::Counter, "atom_eager_total", "Eager steps.")
            .sample(&[("cause", &"a \"b\"\\\n"), ("lane", &2)], f64::INFINITY);
        assert_eq!(
            out,
            "first_total 1\n\
             # HELP atom_free_pages Pages nobody\\nholds.\n# TYPE atom_free_pages gauge\natom_free_pages 3.5\n\
             # HELP atom_eager_total Eager steps.\n# TYPE atom_eager_total counter\n\
             atom_eager_total{cause=\"a \\\"b\\\"\\\\\\n\",lane=\"2\"} +Inf\n"
        );
    }

    #[test]
    fn counts_of_a_histogram_add_up() {
        let mut out = String::new();
        Exposition::new(&mut out).family(Kind::Histogram, "atom_share", "Shares.").histogram(
            &[("lane", &1)],
            &[0.0, 0.25, 1.0],
            &[4, 0, 2],
            1.5,
        );
        assert_eq!(
            out,
            "# HELP atom_share Shares.\n# TYPE atom_share histogram\n\
             atom_share_bucket{lane=\"1\",le=\"0\"} 4\natom_share_bucket{lane=\"1\",le=\"0.25\"} 4\n\
             atom_share_bucket{lane=\"1\",le=\"1\"} 6\natom_share_bucket{lane=\"1\",le=\"+Inf\"} 6\n\
             atom_share_sum{lane=\"1\"} 1.5\natom_share_count{lane=\"1\"} 6\n"
        );
    }

    #[test]
    #[should_panic(expected = "must end in _total")]
    fn a_counter_says_total() {
        Exposition::new(&mut String::new()).family(Kind::Counter, "atom_steps", "Steps.");
    }
}
