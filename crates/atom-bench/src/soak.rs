//! The same requests over and over: every answer must be whole and never change.

use crate::calibrate::Calibration;
use crate::client::{Job, Sample};
use crate::error::{Failure, FailureKind};
use crate::options::Shape;
use crate::prompt::Prompts;
use crate::report::SoakReport;
use crate::run::Workload;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A fixed set of requests of random lengths, drawn at random until the time is over.
///
/// Half of them are greedy, half are sampled with a seed: both must give the same text each time,
/// whatever runs beside them and whatever the caches hold.
#[derive(Debug)]
pub(crate) struct Soak {
    cases: Vec<Job>,
    prompts: Prompts,
    drawn: AtomicUsize,
    /// The first text of each case.
    answers: Mutex<HashMap<usize, String>>,
    equal: AtomicUsize,
    until: Instant,
}

/// More cases than seats, so that a case meets different neighbours each time; few enough that
/// each comes around often.
const CASES_PER_SEAT: usize = 3;
/// Enough entropy that a wrong key of the generator shows at once.
const TEMPERATURE: f32 = 0.8;
/// Prompt numbers of a soak, apart from those of levels.
const FIRST_PROMPT: u64 = 1 << 60;
/// Draws of one prompt number: which of its lengths.
const INPUT: u32 = 0;
const OUTPUT: u32 = 1;
/// Draws of one request: which case.
const CASE: u32 = 2;

impl Soak {
    pub(crate) fn new(
        prompts: Prompts,
        calibration: Calibration,
        shape: Shape,
        concurrency: usize,
        duration: Duration,
    ) -> Self {
        let cases = (0..CASES_PER_SEAT * concurrency).map(|number| {
            let index = FIRST_PROMPT + number as u64;
            let input_tokens = prompts.length(index, INPUT, shape.input_tokens);
            let is_greedy = number % 2 == 0;
            Job {
                number,
                prompt: prompts.prompt(index, calibration.words(input_tokens)),
                max_tokens: prompts.length(index, OUTPUT, shape.output_tokens as usize) as u32,
                temperature: if is_greedy { 0.0 } else { TEMPERATURE },
                seed: (!is_greedy).then_some(number as u64),
            }
        });
        Self {
            cases: cases.collect(),
            prompts,
            drawn: AtomicUsize::new(0),
            answers: Mutex::default(),
            equal: AtomicUsize::new(0),
            until: Instant::now() + duration,
        }
    }

    pub(crate) fn cases(&self) -> usize {
        self.cases.len()
    }

    pub(crate) fn report(&self) -> SoakReport {
        SoakReport { cases: self.cases.len(), equal: self.equal.load(Ordering::Relaxed) }
    }
}

impl Workload for Soak {
    fn next(&self) -> Option<Job> {
        if Instant::now() >= self.until {
            return None;
        }
        // Every case once, so that each has an answer; then whichever is drawn.
        let number = self.drawn.fetch_add(1, Ordering::Relaxed);
        let case = if number < self.cases.len() {
            number
        } else {
            self.prompts.length(FIRST_PROMPT + number as u64, CASE, self.cases.len()) - 1
        };
        Some(self.cases[case].clone())
    }

    fn judge(&self, job: &Job, sample: &Sample) -> Result<(), Failure> {
        let wrong = |why: String| Err(Failure::new(FailureKind::WrongCount, why));
        match sample.completion_tokens {
            None => return wrong("the server sends no usage, so nothing can be checked".into()),
            Some(tokens) if tokens != u64::from(job.max_tokens) => {
                return wrong(format!("case {}: {tokens} tokens instead of {}", job.number, job.max_tokens));
            }
            Some(_) => {}
        }
        // A worker that panicked with the lock held left a whole map behind.
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(first) = answers.get(&job.number) else {
            answers.insert(job.number, sample.text.clone());
            return Ok(());
        };
        if *first == sample.text {
            self.equal.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let same = first.bytes().zip(sample.text.bytes()).take_while(|(a, b)| a == b).count();
        let how = job.seed.map_or_else(|| "greedy".into(), |seed| format!("seed {seed}"));
        Err(Failure::new(
            FailureKind::TextChanged,
            format!("case {} ({how}): the first {same} of {} bytes are equal", job.number, first.len()),
        ))
    }

    fn unsent(&self) -> usize {
        0
    }
}
