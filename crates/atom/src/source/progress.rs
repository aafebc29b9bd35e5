//! What the user sees on stderr while a model is fetched.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// How to show progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// A bar that redraws itself: for a terminal.
    Bar,
    /// A line at the start, about every tenth, and at the end: for a log.
    Lines,
    /// Nothing.
    Quiet,
}

/// Progress of one file.
#[derive(Debug)]
pub(super) struct Meter {
    label: String,
    total_bytes: Option<u64>,
    done_bytes: u64,
    show: Progress,
    bar: Option<ProgressBar>,
}

/// Progress of something whose length nobody knows.
#[derive(Debug)]
pub(super) struct Wait {
    label: String,
    told: Duration,
    show: Progress,
    bar: Option<ProgressBar>,
}

/// Without a total, a log gets a line at each of these.
const LINE_BYTES: u64 = 100_000_000;
/// A log hears this often that something is still running.
const LINE_EVERY: Duration = Duration::from_secs(10);

impl Progress {
    /// A bar on a terminal, lines elsewhere.
    pub(crate) fn stderr() -> Self {
        if std::io::stderr().is_terminal() { Self::Bar } else { Self::Lines }
    }

    /// Says one thing.
    pub(super) fn note(self, line: &str) {
        if self != Self::Quiet {
            eprintln!("{line}");
        }
    }

    /// Starts the progress of a file.
    pub(super) fn meter(self, label: &str, total_bytes: Option<u64>) -> Meter {
        let bar = (self == Self::Bar).then(|| {
            let bar = total_bytes.map_or_else(ProgressBar::no_length, ProgressBar::new);
            bar.set_style(style(if total_bytes.is_some() {
                "{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}"
            } else {
                "{msg} {spinner} {decimal_bytes} {decimal_bytes_per_sec}"
            }));
            bar.set_message(label.to_owned());
            bar
        });
        if self == Self::Lines {
            let of = total_bytes.map_or_else(String::new, |total| format!(" ({})", size(total)));
            eprintln!("{label}{of}");
        }
        Meter { label: label.into(), total_bytes, done_bytes: 0, show: self, bar }
    }

    /// Starts the progress of a command.
    pub(super) fn wait(self, label: &str) -> Wait {
        let bar = (self == Self::Bar).then(|| {
            let bar = ProgressBar::new_spinner();
            bar.set_style(style("{spinner} {msg} ({elapsed})"));
            bar.set_message(label.to_owned());
            bar
        });
        if self == Self::Lines {
            eprintln!("{label} ..");
        }
        Wait { label: label.into(), told: Duration::ZERO, show: self, bar }
    }
}

impl Meter {
    /// Counts bytes that arrived.
    pub(super) fn advance(&mut self, bytes: u64) {
        let before = self.done_bytes;
        self.done_bytes += bytes;
        if let Some(bar) = &self.bar {
            bar.set_position(self.done_bytes);
        }
        if self.show == Progress::Lines && is_line_due(before, self.done_bytes, self.total_bytes) {
            match self.total_bytes {
                Some(total) => eprintln!(
                    "{} {:3} %  {} of {}",
                    self.label,
                    percent(self.done_bytes, total),
                    size(self.done_bytes),
                    size(total)
                ),
                None => eprintln!("{} {}", self.label, size(self.done_bytes)),
            }
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        // The line below takes the bar's place, on success and on failure.
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Wait {
    /// Says that it goes on.
    pub(super) fn tick(&mut self, elapsed: Duration) {
        if let Some(bar) = &self.bar {
            bar.tick();
        }
        if self.show == Progress::Lines && elapsed >= self.told + LINE_EVERY {
            self.told = elapsed;
            eprintln!("{} .. {} s", self.label, elapsed.as_secs());
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Bytes for a person, in powers of ten as disks and hubs count.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates of this file are well-formed")
}

/// True when a multiple of a tenth (or of [`LINE_BYTES`]) lies in `before+1 ..= after`.
fn is_line_due(before: u64, after: u64, total: Option<u64>) -> bool {
    match total {
        Some(total) => percent(before, total) / 10 != percent(after, total) / 10,
        None => before / LINE_BYTES != after / LINE_BYTES,
    }
}

fn percent(done: u64, total: u64) -> u64 {
    // Through 128 bits, since 100 times a large file may not fit 64. An empty file is done.
    (u128::from(done) * 100).checked_div(u128::from(total)).map_or(100, |percent| percent as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_gets_ten_lines_whatever_the_size_of_the_reads() {
        for (total, step) in [(98_362_432_u64, 262_144_u64), (1000, 1), (10, 3), (7, 7)] {
            let mut lines = 0;
            let mut done = 0;
            while done < total {
                let after = (done + step).min(total);
                lines += u32::from(is_line_due(done, after, Some(total)));
                done = after;
            }
            assert!((1..=10).contains(&lines), "{lines} lines for {total} by {step}");
            assert!(total < 1000 || lines == 10);
        }
        assert!(!is_line_due(5, 99_999_999, None));
        assert!(is_line_due(99_999_999, 100_000_000, None));
    }

    #[test]
    fn sizes_are_told_in_powers_of_ten() {
        for (bytes, text) in
            [(999, "999 B"), (98_362_432, "98.4 MB"), (1_503_300_328, "1.50 GB"), (1500, "1.5 kB")]
        {
            assert_eq!(size(bytes), text);
        }
    }
}
