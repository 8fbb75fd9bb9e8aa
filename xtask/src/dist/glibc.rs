//! The check that a program starts on every system with glibc 2.17.

use super::portable::GLIBC;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The libraries that every glibc system has. Users would have to install any other library.
const LIBRARIES: [&str; 8] = [
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libutil.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
];

/// The libraries and symbol versions that a program needs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Needs {
    libraries: Vec<String>,
    /// The versions of glibc's symbols, oldest first.
    versions: Vec<(u32, u32)>,
}

/// Prints the needs of each program, and returns whether glibc 2.17 meets them.
pub(super) fn check(programs: &[PathBuf]) -> Result<bool> {
    let mut good = true;
    println!();
    for program in programs {
        let needs = Needs::parse(&dynamic_section(program)?)?;
        let name = program.file_name().unwrap_or_default().display();
        let newest = needs
            .newest()
            .context("the program needs no symbol of glibc, which is not so")?;
        let libraries = needs.libraries.join(", ");
        println!(
            "{name} needs glibc {}.{} and {libraries}",
            newest.0, newest.1
        );
        for problem in needs.problems() {
            eprintln!("{name}: {problem}");
            good = false;
        }
    }
    Ok(good)
}

fn dynamic_section(program: &Path) -> Result<String> {
    let mut dump = Command::new("objdump");
    dump.arg("--private-headers").arg(program);
    let output = dump.output();
    let output =
        output.context("cannot run objdump, which shows needed symbols (Debian: binutils)")?;
    if !output.status.success() {
        bail!("objdump cannot read {}", program.display());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

impl Needs {
    fn parse(dump: &str) -> Result<Self> {
        let mut needs = Self::default();
        // Versions that a library itself defines have the same form, in another section.
        let mut references = false;
        for line in dump.lines() {
            if !line.starts_with(' ') {
                references = line.starts_with("Version References:");
            }
            let words: Vec<_> = line.split_whitespace().collect();
            match words[..] {
                ["NEEDED", library] => needs.libraries.push(library.to_owned()),
                [_, _, _, version] if references => {
                    if let Some(version) = version.strip_prefix("GLIBC_") {
                        needs.versions.push(parse_version(version)?);
                    }
                }
                _ => {}
            }
        }
        needs.versions.sort_unstable();
        Ok(needs)
    }

    fn newest(&self) -> Option<(u32, u32)> {
        self.versions.last().copied()
    }

    fn problems(&self) -> Vec<String> {
        let late = self.versions.iter().filter(|version| **version > GLIBC);
        let late = late.map(|(major, minor)| format!("needs a symbol of glibc {major}.{minor}"));
        let foreign = self.libraries.iter();
        let foreign = foreign.filter(|library| !LIBRARIES.contains(&library.as_str()));
        let foreign = foreign.map(|library| format!("needs the library {library}"));
        late.chain(foreign).collect()
    }
}

/// Parses `2.17`, or `2.2.5` without its last part, which no comparison here needs.
fn parse_version(version: &str) -> Result<(u32, u32)> {
    let mut parts = version.split('.').map(str::parse);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
        // GLIBC_PRIVATE and GLIBC_ABI_DT_RELR are promises that older versions do not make.
        _ => bail!("a symbol of GLIBC_{version} is needed, which is no numbered version"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "
Dynamic Section:
  NEEDED               libc.so.6
  NEEDED               libm.so.6
  SONAME               libown.so

Version definitions:
1 0x01 0x0865f4e6 GLIBC_2.40
  2 0x00 0x09691a75 GLIBC_2.41

Version References:
  required from libc.so.6:
    0x06969197 0x00 06 GLIBC_2.17
    0x09691a75 0x00 05 GLIBC_2.2.5
";

    #[test]
    fn a_program_for_old_systems_has_no_problem() {
        let needs = Needs::parse(DUMP).unwrap();
        assert_eq!(needs.libraries, ["libc.so.6", "libm.so.6"]);
        assert_eq!(needs.versions, [(2, 2), (2, 17)]);
        assert_eq!(needs.problems(), [""; 0]);
    }

    #[test]
    fn each_later_symbol_and_each_foreign_library_is_a_problem() {
        let dump = DUMP
            .replace("GLIBC_2.17", "GLIBC_2.18")
            .replace("libm.so.6", "libgcc_s.so.1");
        let problems = Needs::parse(&dump).unwrap().problems();
        assert_eq!(
            problems,
            [
                "needs a symbol of glibc 2.18",
                "needs the library libgcc_s.so.1"
            ]
        );
    }

    #[test]
    fn a_symbol_without_a_numbered_version_is_an_error() {
        let dump = DUMP.replace("GLIBC_2.17", "GLIBC_ABI_DT_RELR");
        assert!(Needs::parse(&dump).is_err());
    }

    #[test]
    fn the_dump_of_a_real_program_is_understood() {
        let this = std::env::current_exe().unwrap();
        let Ok(dump) = dynamic_section(&this) else {
            eprintln!("SKIPPED the_dump_of_a_real_program_is_understood: objdump is not here");
            return;
        };
        let needs = Needs::parse(&dump).unwrap();
        assert!(
            needs.libraries.iter().any(|library| library == "libc.so.6"),
            "{needs:?}"
        );
        assert!(
            needs.newest().is_some_and(|newest| newest >= (2, 2)),
            "{needs:?}"
        );
    }
}
