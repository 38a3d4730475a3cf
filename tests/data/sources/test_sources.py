from conftest import in_new_process


def test_sources_need_neither_tensorflow_nor_dali():
    program = (
        "import sys\nfrom tfaccel.data import sources\n"
        "print([each for each in ('tensorflow', 'keras', 'nvidia.dali') if each in sys.modules])"
    )
    assert in_new_process(program) == "[]\n"
