use super::*;

fn written() -> tempfile::TempDir {
    let share = tempfile::tempdir().unwrap();
    write_all(share.path()).unwrap();
    share
}

fn read(share: &tempfile::TempDir, file: &str) -> String {
    std::fs::read_to_string(share.path().join(file))
        .unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The flags and visible subcommands of a program; `true` beside a flag.
fn words(program: &Command) -> Vec<String> {
    let flags = program.get_arguments().filter(|flag| !flag.is_hide_set());
    flags
        .filter_map(|flag| flag.get_long())
        .map(str::to_owned)
        .collect()
}

#[test]
fn each_page_names_every_flag_of_its_program() {
    let share = written();
    for program in programs() {
        let name = program.get_name().to_owned();
        let page = read(&share, &format!("man/man1/{name}.1"));
        // roff writes a hyphen that is no dash as `\-`.
        let page = page.replace("\\-", "-");
        for flag in words(&program) {
            assert!(
                page.contains(&format!("--{flag}")),
                "{name}.1 lacks --{flag}"
            );
        }
        assert!(
            page.contains(env!("CARGO_PKG_VERSION")),
            "{name}.1 lacks the version"
        );
    }
}

#[test]
fn each_visible_subcommand_has_a_page_and_a_hidden_one_has_none() {
    let share = written();
    let cli = kvctl::Cli::command();
    let mut seen = 0;
    for command in cli.get_subcommands() {
        let page = share
            .path()
            .join(format!("man/man1/kvctl-{}.1", command.get_name()));
        assert_eq!(page.exists(), !command.is_hide_set(), "{}", page.display());
        seen += usize::from(!command.is_hide_set());
    }
    let help = share.path().join("man/man1/kvctl-help-put.1");
    assert!(!help.exists(), "a page that only repeats another");
    assert!(seen >= 10, "only {seen} subcommands");
}

#[test]
fn each_shell_completes_every_flag_of_each_program() {
    let share = written();
    for program in programs() {
        let name = program.get_name().to_owned();
        let scripts = [
            format!("bash-completion/completions/{name}"),
            format!("zsh/site-functions/_{name}"),
            format!("fish/vendor_completions.d/{name}.fish"),
        ];
        for script in scripts {
            let text = read(&share, &script);
            for flag in words(&program) {
                assert!(text.contains(&flag), "{script} lacks --{flag}");
            }
        }
    }
}
