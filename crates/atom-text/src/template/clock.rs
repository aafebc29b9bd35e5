//! Dates for templates that print one: Python's `strftime`, in UTC.

const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A moment taken apart.
struct Moment {
    year: i64,
    /// `1 ..= 12`.
    month: usize,
    /// `1 ..= 31`.
    day: i64,
    /// `1 ..= 366`.
    day_of_year: i64,
    /// Days since the epoch, a Thursday.
    days: i64,
    second_of_day: i64,
}

/// Formats a moment, given in seconds since 1970, as the C locale does. `-` after the percent sign leaves
/// out leading zeros. A directive that isn't known is an error that names it.
pub(super) fn strftime(unix_s: i64, format: &str) -> Result<String, String> {
    let moment = Moment::new(unix_s);
    let mut out = String::with_capacity(format.len() * 2);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let is_bare = directive == Some('-');
        if is_bare {
            directive = chars.next();
        }
        let Some(directive) = directive else {
            return Err(format!("date format {format:?} ends within a directive"));
        };
        let text =
            moment.field(directive).ok_or_else(|| format!("date directive %{directive} is not known"))?;
        let bare = text.trim_start_matches(['0', ' ']);
        out.push_str(match (is_bare, bare) {
            (false, _) => &text,
            (true, "") => "0",
            (true, bare) => bare,
        });
    }
    Ok(out)
}

impl Moment {
    /// Howard Hinnant's `civil_from_days`: years that begin in March put the leap day last.
    fn new(unix_s: i64) -> Self {
        let (days, second_of_day) = (unix_s.div_euclid(86_400), unix_s.rem_euclid(86_400));
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_march_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * day_of_march_year + 2) / 153;
        let day = day_of_march_year - (153 * from_march + 2) / 5 + 1;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let before_march = 59 + i64::from(is_leap);
        let day_of_year =
            if month > 2 { day_of_march_year + before_march + 1 } else { day_of_march_year - 305 };
        Self { year, month: month as usize, day, day_of_year, days, second_of_day }
    }

    fn field(&self, directive: char) -> Option<String> {
        let (hour, minute) = (self.second_of_day / 3_600, self.second_of_day / 60 % 60);
        let hour_of_12 = (hour + 11) % 12 + 1;
        let weekday = DAYS[self.days.rem_euclid(7) as usize];
        let month = MONTHS[self.month - 1];
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'B' => month.into(),
            'b' | 'h' => month[..3].into(),
            'A' => weekday.into(),
            'a' => weekday[..3].into(),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour_of_12:02}"),
            'M' => format!("{minute:02}"),
            'S' => format!("{:02}", self.second_of_day % 60),
            'p' => if hour < 12 { "AM" } else { "PM" }.into(),
            'Z' => "UTC".into(),
            'z' => "+0000".into(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{hour:02}:{minute:02}:{:02}", self.second_of_day % 60),
            'n' => "\n".into(),
            't' => "\t".into(),
            '%' => "%".into(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_read_as_python_prints_them() {
        // Each expectation is what Python's datetime.fromtimestamp(.., UTC).strftime(..) gives.
        let cases = [
            (0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001"),
            (1_709_208_000, "%d %b %Y", "29 Feb 2024"),
            (1_709_208_000, "%j %a %I %p", "060 Thu 12 PM"),
            (1_735_689_599, "%F %T %j", "2024-12-31 23:59:59 366"),
            (1_735_689_600, "%B %-d, %Y", "January 1, 2025"),
            (1_741_305_600, "%e|%-m|%y|%%|%-H", " 7|3|25|%|0"),
            (-1, "%Y-%m-%d %H:%M:%S %A", "1969-12-31 23:59:59 Wednesday"),
            (4_107_542_400, "%Y-%m-%d %j", "2100-03-01 060"),
        ];
        for (unix_s, format, expected) in cases {
            assert_eq!(strftime(unix_s, format).as_deref(), Ok(expected), "{unix_s} {format}");
        }
    }

    #[test]
    fn every_day_of_four_centuries_follows_the_one_before() {
        let mut last = Moment::new(-1);
        for day in 0..146_097 {
            let next = Moment::new(day * 86_400);
            let is_next_day = next.day == last.day + 1 && next.month == last.month && next.year == last.year;
            let is_next_month = next.day == 1 && next.month == last.month + 1 && last.day >= 28;
            let is_next_year = (next.day, next.month, next.year) == (1, 1, last.year + 1);
            assert!(is_next_day || is_next_month || is_next_year, "day {day}");
            assert_eq!(next.day_of_year, if is_next_year { 1 } else { last.day_of_year + 1 }, "day {day}");
            last = next;
        }
        assert_eq!((last.year, last.month, last.day), (2369, 12, 31));
    }

    #[test]
    fn unknown_directives_are_named() {
        assert!(strftime(0, "%Q").unwrap_err().contains("%Q"));
        assert!(strftime(0, "at %").unwrap_err().contains("ends within"));
    }
}
